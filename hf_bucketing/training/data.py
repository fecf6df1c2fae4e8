"""Columns, sampler and collator of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from ..errors import BucketingError
from ..geometry import LatentSpec
from ..loading import (
    BucketBatchSampler,
    BucketCollator,
    PackBatchSampler,
    PackCollator,
    PlannedBatchSampler,
    StandIns,
)
from ..loading.media_collator import MediaCollator
from ..mapping import BucketColumns, PreparedDataset, map_columns
from ..open_table import open_table
from .config import TrainingConfig

UNREADABLE = "unreadable.jsonl"


class TrainingData(NamedTuple):
    """The loader of a run, not yet prepared, and its sampler."""

    loader: DataLoader[Any]
    sampler: PlannedBatchSampler


def make_data(config: TrainingConfig, spec: LatentSpec) -> TrainingData:
    """Read the prepared data set and make its loader.

    Args:
        config ([`TrainingConfig`]): Names the folder and the way of batching.
        spec ([`LatentSpec`]): Of the model that is trained.

    Raises:
        BucketingError: If the data set was prepared for another model, or holds no usable row.
    """
    prepared = PreparedDataset.load(config.dataset_dir)
    if prepared.spec != spec:
        raise BucketingError(
            f"{config.dataset_dir} was prepared for {prepared.spec}, but the model has {spec}; prepare it again with "
            f"--pretrained_model_name_or_path {config.pretrained_model_name_or_path}."
        )
    dataset, seed = prepared.dataset, config.seed
    options: dict[str, Any] = {
        "column": prepared.column,
        "caption_column": prepared.caption_column,
        "root": prepared.root,
        "seed": seed,
    }
    sampler: PlannedBatchSampler
    collator: MediaCollator
    if config.batching == "pack":
        dataset = map_columns(dataset, BucketColumns(open_table(spec), spec), overwrite=True)
    if config.on_error == "replace":
        options["on_error"], options["stand_ins"] = (
            "replace",
            StandIns(
                dataset,
                log=Path(config.output_dir) / "logs" / UNREADABLE,
                max_errors=config.max_errors,
                max_share=config.max_error_share,
            ),
        )
    if config.batching == "bucket":
        sampler = BucketBatchSampler(
            dataset["bucket_id"],
            table=prepared.table,
            batch_size=config.train_batch_size if config.capacity is None else None,
            capacity=config.capacity,
            spec=spec,
            seed=seed,
        )
        collator = BucketCollator(prepared.table, **options)
    else:
        assert config.capacity is not None, "TrainingConfig checks it"
        sampler = PackBatchSampler(
            dataset["num_tokens"], capacity=config.capacity, multiple=config.strip_length, seed=seed
        )
        collator = PackCollator(spec, **options)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collator,
        num_workers=config.dataloader_num_workers,
        persistent_workers=config.dataloader_num_workers > 0,
        timeout=config.dataloader_timeout if config.dataloader_num_workers else 0,
    )
    return TrainingData(loader, sampler)
