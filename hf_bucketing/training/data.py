"""Columns, sampler and collator of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from ..buckets.cost import CostModel
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..caching.collator import CachedCollator
from ..columns.apply import map_columns
from ..columns.arrays import column_array
from ..columns.buckets import BucketColumns
from ..columns.prepared import CacheInfo, PreparedDataset
from ..errors import BucketingError, quoted
from ..loaders.bucket_sampler import BucketBatchSampler
from ..loaders.collators import BucketCollator, PackCollator
from ..loaders.faults import FaultRule
from ..loaders.pack_sampler import PackBatchSampler
from ..loaders.planned import PlannedBatchSampler
from ..loaders.random_resize import RandomResize
from ..loaders.workers import worker_options
from ..losses.reduction import Reduction, reduction_weights
from ..media.views import ViewRule
from ..models.recipe import TextEmbeddings
from .config import TrainingConfig

UNREADABLE = "unreadable.jsonl"


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The loader of a run, not yet prepared, its sampler, and what each row weighs.

    Attributes:
        loader (`DataLoader`): Not yet prepared.
        sampler ([`PlannedBatchSampler`][hf_bucketing.loaders.PlannedBatchSampler]): Of the loader.
        bucket_ids (array of `int`, shape `(n,)`): Size of each row, in `table`.
        table ([`BucketTable`] or [`OpenTable`]): What the ids mean.
        num_tokens (array of `int`, shape `(n,)`): Tokens of each row at its own size or its bucket's.
        cost_model ([`CostModel`][hf_bucketing.CostModel]): What rows of so many tokens cost.
        reduction (`"sample"` or `"token"`): What counts alike in the loss.
        empty_text ([`TextEmbeddings`], *optional*): The empty caption, where dropped ones come from a cache.
    """

    loader: DataLoader[Any]
    sampler: PlannedBatchSampler
    bucket_ids: npt.NDArray[np.int64]
    table: BucketTable | OpenTable
    num_tokens: npt.NDArray[np.int64]
    cost_model: CostModel
    reduction: Reduction
    empty_text: TextEmbeddings | None

    def tokens_of(self, rows: npt.NDArray[np.int64], *, epoch: int) -> npt.NDArray[np.int64]:
        """Return the tokens of rows, `(n,)`; they change with the epoch where sizes are drawn at random."""
        if isinstance(self.sampler, PackBatchSampler):
            return self.sampler.tokens_in(epoch)[rows]
        return self.num_tokens[rows]

    def loss_weights(self, rows: npt.NDArray[np.int64], *, epoch: int) -> torch.Tensor:
        """Return what the losses of rows weigh, `(n,)`."""
        return reduction_weights(torch.from_numpy(self.tokens_of(rows, epoch=epoch)), self.reduction)

    def sizes(self, rows: npt.NDArray[np.int64]) -> list[Size]:
        """Return the size that each row is loaded at."""
        return [self.table.size(int(self.bucket_ids[row])) for row in rows]


def make_data(config: TrainingConfig, spec: LatentSpec, *, width: int) -> TrainingData:
    """Read the prepared data set and make its loader.

    Args:
        config ([`TrainingConfig`]): Names the folder and the way of batching.
        spec ([`LatentSpec`]): Of the model that is trained.
        width (`int`): Channels of its tokens, which decide what attention costs beside all else.

    Raises:
        BucketingError: If the data set was prepared for another model, or holds no usable row.
    """
    prepared = PreparedDataset.load(config.dataset_dir)
    if prepared.spec != spec:
        raise BucketingError(
            f"{config.dataset_dir} was prepared for {prepared.spec}, but the model has {spec}; prepare it again with "
            f"--pretrained_model_name_or_path {config.pretrained_model_name_or_path}."
        )
    dataset = prepared.dataset
    table: BucketTable | OpenTable = prepared.table
    if config.batching == "pack":
        table = prepared.open_table
        dataset = map_columns(dataset, BucketColumns(table, spec), overwrite=True)
    bucket_ids, num_tokens = (column_array(dataset, name).astype(np.int64) for name in ("bucket_id", "num_tokens"))
    cost_model = CostModel.for_transformer(width)
    resize = (
        None
        if config.random_resize is None
        else RandomResize(spec=spec, min_side=config.random_resize, seed=config.seed)
    )
    sampler: PlannedBatchSampler
    if config.batching == "bucket":
        sampler = BucketBatchSampler(
            bucket_ids,
            table=table,
            rejection=dataset["rejection"],
            batch_size=config.train_batch_size if config.capacity is None else None,
            capacity=config.capacity_tokens,
            spec=spec,
            tail=config.tail,
            longest_first=config.longest_first,
            seed=config.seed,
        )
    else:
        assert config.capacity_tokens is not None, "TrainingConfig checks it"
        sizes = {name: column_array(dataset, name) for name in ("num_frames", "height", "width", "index")}
        sizes["num_frames"] = prepared.open_table.cut(sizes["num_frames"])
        sampler = PackBatchSampler(
            num_tokens if resize is None else resize.token_counter(**sizes),
            capacity=config.capacity_tokens,
            rejection=dataset["rejection"],
            multiple=config.strip_length,
            strategy=config.pack_strategy,
            balance=config.balance,
            cost_model=cost_model if config.balance == "cost" else None,
            accumulation_steps=config.gradient_accumulation_steps,
            longest_first=config.longest_first,
            seed=config.seed,
        )
    collator = _make_collator(config, prepared, dataset, table=table, resize=resize)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collator,
        persistent_workers=config.dataloader_num_workers > 0,
        timeout=config.dataloader_timeout if config.dataloader_num_workers else 0,
        **worker_options(config.dataloader_num_workers),
    )
    return TrainingData(
        loader=loader,
        sampler=sampler,
        bucket_ids=bucket_ids,
        table=table,
        num_tokens=num_tokens,
        cost_model=cost_model,
        reduction=config.loss_reduction,
        empty_text=_empty_text(collator) if isinstance(collator, CachedCollator) and config.caption_dropout else None,
    )


def _empty_text(collator: CachedCollator) -> TextEmbeddings:
    text = collator.empty_text()
    mask = text.get("text_mask")
    return TextEmbeddings(text["text_values"][None], None if mask is None else mask[None])


def _make_collator(
    config: TrainingConfig,
    prepared: PreparedDataset,
    dataset: Dataset,
    *,
    table: BucketTable | OpenTable,
    resize: RandomResize | None,
) -> BucketCollator | PackCollator | CachedCollator:
    if prepared.cache is not None:
        return _cached_collator(config, prepared, prepared.cache)
    options: dict[str, Any] = {
        "column": prepared.column,
        "caption_column": prepared.caption_column,
        "root": prepared.root,
        "views": ViewRule(
            random_crop=not config.center_crop,
            frame_picking=config.frame_picking,
            flip_probability=config.flip_probability,
            video_decoder=config.video_decoder,
        ),
        "seed": config.seed,
        "replacements": FaultRule(
            on_error=config.on_error, max_errors=config.max_errors, max_error_share=config.max_error_share
        ).replacements(dataset, log=Path(config.output_dir) / "logs" / UNREADABLE),
    }
    if isinstance(table, OpenTable):
        return PackCollator(table, resize=resize, **options)
    return BucketCollator(table, **options)


def _cached_collator(config: TrainingConfig, prepared: PreparedDataset, cache: CacheInfo) -> CachedCollator:
    if cache.batching != config.batching:
        raise BucketingError(
            f"{config.dataset_dir} caches latents for --batching {cache.batching}, not {config.batching}; run "
            "scripts/cache_latents.py with the same --batching."
        )
    given = config.not_default(
        *("center_crop", "frame_picking", "flip_probability", "video_decoder", "random_resize", "on_error")
    )
    if given:
        raise BucketingError(
            f"{quoted(given)} change what is decoded, but {config.dataset_dir} holds latents that are encoded "
            "already; give such options to scripts/cache_latents.py."
        )
    return CachedCollator(
        cache.folder,
        stack=config.batching == "bucket",
        caption_column=prepared.caption_column,
        empty_text_key=cache.empty_text_key,
    )
