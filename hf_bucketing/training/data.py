"""Columns, sampler, collator and loader of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from ..buckets.calibration import read_cost_model
from ..buckets.cost import CostModel
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..caching.collator import CachedCollator
from ..columns.apply import map_columns
from ..columns.arrays import column_array
from ..columns.buckets import BucketColumns
from ..columns.prepared import ROW_WEIGHT, CacheInfo, PreparedDataset, SourceRows
from ..errors import BucketingError, quoted
from ..loaders.bucket_sampler import BucketBatchSampler
from ..loaders.collators import BucketCollator, PackCollator
from ..loaders.pack_sampler import PackBatchSampler
from ..loaders.planned import PlannedBatchSampler
from ..loaders.random_resize import RandomResize
from ..loaders.workers import worker_options
from ..losses.reduction import Reduction, reduction_weights
from ..models.recipe import TextEmbeddings
from ..packing.token_drop import TokenDrop
from ..plans.epoch import EpochPlan
from ..settings import not_default
from .config import TrainingConfig

UNREADABLE = "unreadable.jsonl"
"""Log of unreadable samples, beside those of the run."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The loader of a run, its sampler, and the tokens and weight of each row.

    Attributes:
        loader (`DataLoader`): Loader, not yet prepared by accelerate.
        sampler ([`PlannedBatchSampler`][hf_bucketing.loaders.PlannedBatchSampler]): The loader's batch sampler.
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row in `table`.
        table ([`BucketTable`] or [`OpenTable`]): Table of the buckets.
        num_tokens (array of `int`, shape `(n,)`): Tokens of each row, at its own size or at its bucket's.
        text_tokens (`int`): Tokens that a caption adds to the sequence of its row.
        cost_model ([`CostModel`][hf_bucketing.CostModel]): Cost of a row by its tokens and those of its text.
        reduction (`"sample"` or `"token"`): Unit of equal weight in the loss.
        empty_text ([`TextEmbeddings`], *optional*): Empty caption, where captions are dropped and come from a cache.
        sources ([`SourceRows`][hf_bucketing.columns.prepared.SourceRows], *optional*): Source of each row, where there
            are several.
    """

    loader: DataLoader[Any]
    sampler: PlannedBatchSampler
    bucket_ids: npt.NDArray[np.int64]
    table: BucketTable | OpenTable
    num_tokens: npt.NDArray[np.int64]
    text_tokens: int
    cost_model: CostModel
    reduction: Reduction
    empty_text: TextEmbeddings | None
    sources: SourceRows | None = None

    def counts_by_source(self, plan: EpochPlan) -> dict[str, dict[str, int]]:
        """Return the counts of each source in a plan, by name; none without several sources."""
        return {} if self.sources is None else plan.counts_by_group(self.sources.ids, self.sources.names)

    def tokens_of(self, rows: npt.NDArray[np.int64], *, epoch: int) -> npt.NDArray[np.int64]:
        """Return the tokens of rows, `(n,)`; they change with the epoch where sizes are drawn at random."""
        if isinstance(self.sampler, PackBatchSampler):
            return self.sampler.tokens_in(epoch)[rows]
        return self.num_tokens[rows]

    def lengths_of(self, rows: npt.NDArray[np.int64], *, epoch: int) -> npt.NDArray[np.int64]:
        """Return the tokens of rows and of the text in their sequence, `(n,)`: what a step of them takes."""
        return self.tokens_of(rows, epoch=epoch) + self.text_tokens

    def loss_weights(self, rows: npt.NDArray[np.int64], *, epoch: int) -> torch.Tensor:
        """Return the weights of the losses of rows, `(n,)`."""
        return reduction_weights(torch.from_numpy(self.tokens_of(rows, epoch=epoch)), self.reduction)

    def sizes(self, rows: npt.NDArray[np.int64]) -> list[Size]:
        """Return the target size of each row."""
        return [self.table.size(int(self.bucket_ids[row])) for row in rows]


def make_data(config: TrainingConfig, spec: LatentSpec, *, width: int, text_tokens: int = 0) -> TrainingData:
    """Read the prepared data set and make its loader.

    The width of the model, the channels of its tokens, decides the cost of attention relative to all else.
    `text_tokens` are those that a caption adds to the sequence of its sample, as a
    [`Recipe`][hf_bucketing.models.recipe.Recipe] counts them; `max_tokens` holds them too.

    Raises:
        BucketingError: If the data set was prepared for another model, or holds no usable row.
    """
    prepared = PreparedDataset.load(config.dataset_dir)
    if prepared.spec != spec:
        raise BucketingError(
            f"{config.dataset_dir} was prepared for {prepared.spec}, but the model has {spec}; prepare it again with "
            f"--pretrained_model_name_or_path {config.pretrained_model_name_or_path}."
        )
    if prepared.caption_column is None:
        raise BucketingError(
            f"The rows of {config.dataset_dir} have no captions, which the model needs; prepare the data set with "
            "--caption_column, or with captions beside its files."
        )
    batches = config.batches
    dataset = prepared.dataset
    table: BucketTable | OpenTable = prepared.table
    if batches.batching == "pack":
        table = prepared.open_table
        dataset = map_columns(dataset, BucketColumns(table, spec), overwrite=True)
    bucket_ids, num_tokens = (column_array(dataset, name).astype(np.int64) for name in ("bucket_id", "num_tokens"))
    if batches.token_drop is not None:
        num_tokens = _kept(batches.token_drop, bucket_ids, num_tokens, table=table, spec=spec)
    measured = batches.cost_model
    cost_model = CostModel.for_transformer(width) if measured is None else read_cost_model(measured)
    resize = None
    if batches.random_resize is not None:
        resize = RandomResize(spec=spec, min_side=batches.random_resize, seed=config.seed)
    sampler: PlannedBatchSampler
    common: dict[str, Any] = {
        "rejection": dataset["rejection"],
        "weights": column_array(dataset, ROW_WEIGHT) if ROW_WEIGHT in dataset.column_names else None,
        "text_tokens": text_tokens,
        "longest_first": batches.longest_first,
        "seed": config.seed,
    }
    if batches.batching == "bucket":
        sampler = BucketBatchSampler(
            bucket_ids,
            table=table,
            batch_size=batches.train_batch_size if batches.max_tokens is None else None,
            max_tokens=batches.token_limit,
            spec=spec,
            remainder=batches.remainder,
            **common,
        )
    else:
        assert batches.token_limit is not None, "BatchConfig checks it"
        sizes = {name: column_array(dataset, name) for name in ("num_frames", "height", "width", "index")}
        sizes["num_frames"] = prepared.open_table.cut(sizes["num_frames"])
        sampler = PackBatchSampler(
            num_tokens if resize is None else resize.token_counter(**sizes),
            max_tokens=batches.token_limit,
            strip_length=batches.strip_length,
            strategy=batches.pack_strategy,
            balance=batches.balance,
            cost_model=cost_model if batches.balance == "cost" else None,
            accumulation_steps=config.gradient_accumulation_steps,
            **common,
        )
    collator = _make_collator(config, prepared, dataset, table=table, resize=resize)
    empty_text = None
    if isinstance(collator, CachedCollator) and config.objective.caption_dropout:
        empty = collator.empty_text()
        empty_text = TextEmbeddings(empty["text_values"], empty.get("text_mask"), empty.get("text_others", {}))
    workers = config.loader.dataloader_num_workers
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collator,
        persistent_workers=workers > 0,
        timeout=config.loader.dataloader_timeout if workers else 0,
        **worker_options(workers),
    )
    return TrainingData(
        loader=loader,
        sampler=sampler,
        bucket_ids=bucket_ids,
        table=table,
        num_tokens=num_tokens,
        text_tokens=text_tokens,
        cost_model=cost_model,
        reduction=config.objective.loss_reduction,
        empty_text=empty_text,
        sources=prepared.sources,
    )


def _kept(
    drop: TokenDrop,
    bucket_ids: npt.NDArray[np.int64],
    num_tokens: npt.NDArray[np.int64],
    *,
    table: BucketTable | OpenTable,
    spec: LatentSpec,
) -> npt.NDArray[np.int64]:
    """Return the tokens of each row that are left to plan with; a fixed rate keeps as many whatever the seed."""
    usable = num_tokens > 0
    ids, buckets = np.unique(bucket_ids[usable], return_inverse=True)
    kept = num_tokens.copy()
    grids = [spec.grid(table.size(bucket_id)) for bucket_id in ids.tolist()]
    kept[usable] = np.array(drop.num_kept(grids, seeds=[0] * len(grids)), np.int64)[buckets]
    return kept


def _make_collator(
    config: TrainingConfig,
    prepared: PreparedDataset,
    dataset: Dataset,
    *,
    table: BucketTable | OpenTable,
    resize: RandomResize | None,
) -> BucketCollator | PackCollator | CachedCollator:
    if prepared.cache is not None:
        _check_cached(config, prepared.cache)
        return CachedCollator(prepared.cache, caption_column=prepared.caption_column)
    options: dict[str, Any] = {
        "column": prepared.column,
        "caption_column": prepared.caption_column,
        "root": prepared.root,
        "conditions": prepared.conditions,
        "views": config.views,
        "seed": config.seed,
        "replacements": config.faults.replacements(dataset, log=Path(config.output_dir) / "logs" / UNREADABLE),
    }
    if isinstance(table, OpenTable):
        return PackCollator(table, resize=resize, **options)
    return BucketCollator(table, **options)


def _check_cached(config: TrainingConfig, cache: CacheInfo) -> None:
    batching = config.batches.batching
    if cache.batching != batching:
        raise BucketingError(
            f"{config.dataset_dir} caches latents for --batching {cache.batching}, not {batching}; run "
            "scripts/cache_latents.py with the same --batching."
        )
    names = ("random_crop", "frame_picking", "flip_probability", "video_decoder", "random_resize", "on_error")
    if given := not_default(config, *names):
        raise BucketingError(
            f"Omit {quoted(given)}: {config.dataset_dir} holds encoded latents, and such settings change what is "
            "decoded. Give them to scripts/cache_latents.py."
        )
