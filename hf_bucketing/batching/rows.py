"""Columns, sampler, collator and loader of a training run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from datasets import Dataset
from torch.utils.data import DataLoader

from ..buckets.arrays import IntArray
from ..buckets.assignment import REJECTED_BUCKET
from ..buckets.kept import mean_kept_area
from ..buckets.sizes import LatentSpec, Size
from ..caching.collator import CachedCollator
from ..caching.columns import NULL_TEXT_KEY
from ..caching.views import CACHED_VIEW, OF_VIEWS, resize_of_views, views_as_rows, views_in_turn
from ..columns.apply import map_columns, with_columns
from ..columns.arrays import column_array
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import holds_stream
from ..columns.split import check_apart, split_rows
from ..conditions.names import REFERENCE
from ..conditions.rows import RowConditions
from ..configuration.objective import weights_of_sources
from ..configuration.run import TrainingConfig
from ..errors import BucketingError, quoted
from ..loaders.captions import CaptionRule
from ..loaders.occurrences import NumberedRows
from ..loaders.planned import PlannedBatchSampler, StepCount
from ..loaders.processes import check_same
from ..loaders.random_resize import RandomResize
from ..losses.per_sample import reduction_weights
from ..models.condition_checks import NO_SAMPLES, OfSamples
from ..models.texts import TextEmbeddings
from ..placement.context_parallel import prepare_in_groups
from ..plans.epoch import EpochPlan
from ..plans.rows import EpochConfig
from ..randomness import ROW
from ..settings import changed, flatten, marked, not_default
from ..streaming.config import StreamConfig
from . import Batching, way_of
from .checks import (
    check_audio,
    check_cached_rows,
    check_marks,
    check_named_sources,
    check_prepared,
    check_reference_dropout,
)
from .run_data import LargestStep, RunData, StepRows, make_cost_model, unreadable_log
from .sample_rows import ModelTokens, SampleRows
from .ways import make_collator

logger = get_logger(__name__)


@dataclass(kw_only=True)
class TrainingData(RunData):
    """The loader of a run whose rows are planned, its sampler, and the tokens and weight of each row.

    Attributes beside those of [`RunData`]:
        dataset (`Dataset`): The prepared rows.
        sampler ([`PlannedBatchSampler`][hf_bucketing.loaders.PlannedBatchSampler]): The loader's batch sampler.
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row in `table`.
        num_tokens (array of `int`, shape `(n,)`): Tokens of each row, at its own size or at its bucket's, with those
            of its conditions.
        planned_tokens (array of `int`, shape `(n,)`, or callable of the epoch): The same, of sizes that are drawn at
            random where some are.
        learned_tokens (array of `int`, shape `(n,)`, or callable of the epoch): Tokens of each row that enter the
            loss: those of its own grid.
        conditions ([`RowConditions`][hf_bucketing.conditions.rows.RowConditions]): Conditions of the rows.
        source_ids (array of `int`, shape `(n,)`, *optional*): Source of each row, where there are several.
        file_names (callable): Returns the names of the files of some rows, by their places in `dataset`.
    """

    dataset: Dataset
    sampler: PlannedBatchSampler
    bucket_ids: IntArray
    num_tokens: IntArray
    planned_tokens: IntArray | Callable[[int], IntArray]
    learned_tokens: IntArray | Callable[[int], IntArray]
    row_conditions: RowConditions
    source_ids: IntArray | None = None
    file_names: Callable[[Sequence[int]], list[str]]

    def counts_by_source(self, plan: EpochPlan) -> dict[str, dict[str, int]]:
        """Return the counts of each source in a plan, by name; none without several sources."""
        return {} if self.source_ids is None else plan.counts_by_group(self.source_ids, self.sources)

    def tokens_of(self, rows: IntArray, *, epoch: int) -> IntArray:
        """Return the tokens of rows, `(n,)`; they change with the epoch where sizes are drawn at random."""
        return _in_epoch(self.planned_tokens, epoch)[rows]

    def lengths_of(self, rows: IntArray, *, epoch: int) -> IntArray:
        """Return the tokens of rows and of the text in their sequence, `(n,)`: what a step of them takes."""
        return self.tokens_of(rows, epoch=epoch) + self.text_tokens

    def costs_of(self, plan: EpochPlan, *, epoch: int) -> npt.NDArray[np.float64]:
        """Return the cost of each batch of a plan, `(b,)`, padding included."""
        lengths = self.way.computed_lengths(self.lengths_of(plan.indices, epoch=epoch), plan.offsets)
        return self.cost_model.pack_cost(lengths, plan.offsets)

    def rows_of(self, loader: Any, batch: Mapping[str, Any], *, epoch: int) -> StepRows:
        """Return what a batch of the plan counts for."""
        rows = loader.rows_of_step(loader.step - 1)
        return StepRows(
            tokens=self.lengths_of(rows, epoch=epoch),
            weights=self.loss_weights(rows, epoch=epoch),
            total=float(self.loss_weights(loader.rows_in_window, epoch=epoch).sum()),
            sources=None if self.source_ids is None else self.source_ids[rows],
        )

    def loss_weights(self, rows: IntArray, *, epoch: int) -> torch.Tensor:
        """Return the weights of the losses of rows, `(n,)`."""
        learned = _in_epoch(self.learned_tokens, epoch)[rows]
        weights = reduction_weights(torch.from_numpy(learned), self.reduction)
        return weights if self.source_ids is None else self.weigh_sources(weights, self.source_ids[rows])

    def bucket_counts(self) -> dict[int, int]:
        """Return the buckets of the usable rows, each with its number of rows."""
        ids, counts = np.unique(self.bucket_ids[self.num_tokens > 0], return_counts=True)
        return dict(zip(ids.tolist(), counts.tolist(), strict=True))

    def example_of(self, bucket_id: int) -> str:
        """Return the name of the first file of a bucket, after a comma."""
        rows = np.flatnonzero((self.bucket_ids == bucket_id) & (self.num_tokens > 0))
        return f", such as {self.file_names(rows[:1].tolist())[0]}"

    def steps_left(self, loader: Any, config: TrainingConfig, *, finished: int) -> StepCount:
        """Return the optimizer steps from the place of the loader to the end of the last epoch.

        `finished` are those that the run has made.
        """
        accumulation = config.gradient_accumulation_steps
        now = math.ceil(len(loader) / accumulation) if loader.epoch < config.num_train_epochs else 0
        later = self.sampler.count_steps(loader.epoch + 1, config.num_train_epochs, accumulation_steps=accumulation)
        return StepCount(now + later.steps, later.exact)

    def largest_step(self) -> LargestStep:
        """Return the largest step of the present epoch."""
        plan = self.sampler.plan()
        lengths = self.lengths_of(plan.indices, epoch=self.sampler.epoch)
        computed = self.way.computed_lengths(lengths, plan.offsets)
        of_batches = np.add.reduceat(computed, plan.offsets[:-1])
        most = int(of_batches.argmax())
        batch, rows = slice(*plan.offsets[most : most + 2]), plan.batch(most)
        if (lengths[batch] < computed[batch]).any():  # padded to the longest
            rows = np.full_like(rows, rows[lengths[batch].argmax()])
        return self.step_of(rows, tokens=int(of_batches[most]))

    def step_of(self, rows: IntArray, *, tokens: int) -> LargestStep:
        """Return the step that some rows make, which takes as many tokens."""
        return LargestStep(self.sizes(rows), tokens, self.row_conditions.select(rows))

    def epoch_summary(self, loader: Any) -> Mapping[str, Any]:
        """Return the counts of the plan of the present epoch, and the kept area of all rows, for the log."""
        of_sources = self.counts_by_source(loader.plan)
        return {
            **loader.plan.summary(),
            "kept_area": self.kept_area,
            **({"sources": of_sources} if of_sources else {}),
        }

    @cached_property
    def kept_area(self) -> float:
        """Mean kept area of the usable rows, each once, in their buckets or at their own sizes."""
        heights, widths = (column_array(self.dataset, name) for name in ("height", "width"))
        ids = np.where(self.num_tokens > 0, self.bucket_ids, REJECTED_BUCKET)
        return mean_kept_area(self.table, ids, heights=heights, widths=widths)

    def after_epoch(self, loader: Any, accelerator: Accelerator, *, num_batches: int) -> list[str]:
        """Return no line of text: the plan said all of an epoch."""
        return []

    def describe_samples(self, config: TrainingConfig) -> list[str]:
        """Return which samples the plan of the first epoch keeps, and in which views."""
        plan, epoch = self._first_plan()
        dropped = ", ".join(f"{count} {reason}" for reason, count in plan.drop_reasons.items()) or "none"
        return [
            f"  Samples {_period(plan, epoch)} = {plan.kept} kept, {plan.repeated} repeated, dropped: {dropped}",
            *(
                f"    of {name} = {counts['kept']} kept, {counts['repeated']} repeated, {counts['dropped']} dropped"
                for name, counts in self.counts_by_source(plan).items()
            ),
            *_describe_views(self.loader.collate_fn, config),
        ]

    def describe_steps(self, config: TrainingConfig) -> list[str]:
        """Return the steps of the plan of the first epoch, and their cost."""
        plan, epoch = self._first_plan()
        of_samples = self.lengths_of(plan.indices, epoch=epoch)
        tokens = np.add.reduceat(of_samples, plan.offsets[:-1])
        costs = self.costs_of(plan, epoch=epoch).reshape(plan.num_steps, -1)
        padding = 1 - of_samples.sum() / self.way.computed_lengths(of_samples, plan.offsets).sum()
        limit = config.batches.token_limit
        fill = "" if limit is None else f", {tokens.mean() / limit:.1%} of {limit} filled"
        fill += f", at most {padding:.1%} padding" if padding else ""
        return [
            f"  Steps {_period(plan, epoch)} = {plan.num_steps} on each process{self.way.describe_plan(plan)}",
            f"  Tokens per step and process = {tokens.mean():.0f} on average, {tokens.max()} at most{fill}",
            f"  Efficiency over processes = {costs.mean(1).sum() / costs.max(1).sum():.1%} (mean ÷ largest cost)",
        ]

    def _first_plan(self) -> tuple[EpochPlan, int]:
        """Return the plan of the epoch that comes first, and the number of that epoch."""
        plan, epoch = self.sampler.plan(), self.sampler.epoch
        if not plan.num_steps:  # resumed on another number of processes at the end of an epoch
            epoch += 1
            plan = self.sampler.plan(epoch)
        return plan, epoch

    def prepare(self, accelerator: Accelerator, model: Any, optimizer: Any, *, degree: int) -> tuple[Any, Any, Any]:
        """Let accelerate prepare a model, its optimizer and the loader, of which `degree` processes share batches."""
        model, optimizer, loader = prepare_in_groups(accelerator, model, optimizer, self.loader, degree=degree)
        return model, optimizer, loader

    def check_same(self, accelerator: Accelerator) -> None:
        """Raise BucketingError on all processes if they read other rows."""
        advice = "copy the folder of `dataset_dir` from one to the others, or put it where all see it"
        rows = self.sampler.state_dict()["fingerprint"]
        check_same(accelerator, rows, what="rows in `dataset_dir`", advice=advice)

    def name_rows(self, rows: Sequence[int]) -> list[str]:
        """Return the numbers of rows with their files."""
        if not rows:
            return super().name_rows(rows)
        places = dict(zip(column_array(self.dataset, ROW).tolist(), range(len(self.dataset)), strict=True))
        names = zip(rows, self.file_names([places[row] for row in rows]), strict=True)
        return [f"row {row} ({name})" for row, name in names]

    def cached_batch(self) -> Mapping[str, Any] | None:
        """Return a batch of one usable row of a cache; None where nothing is cached."""
        collator, rows = self.loader.collate_fn, np.flatnonzero(self.num_tokens > 0)
        if not isinstance(collator, CachedCollator) or not len(rows):
            return None
        return collator([self.dataset[int(rows[0])]])

    @property
    def with_audio(self) -> int | None:
        """Usable rows that have audio; None where none is trained."""
        audio = self.row_conditions.audio
        return None if audio is None else int(audio.present[self.num_tokens > 0].sum())

    @property
    def frame_rates(self) -> npt.NDArray[np.float64]:
        """Frames per second of the usable rows, `(n,)`, 0 for images."""
        return column_array(self.dataset, "fps")[self.num_tokens > 0]

    @property
    def rejections(self) -> npt.NDArray[Any]:
        """Reason why each row has no bucket, `(n,)`."""
        return column_array(self.dataset, "rejection")

    def sizes(self, rows: IntArray) -> list[Size]:
        """Return the target size of each row."""
        return [self.table.size(int(self.bucket_ids[row])) for row in rows]

    def reference_sizes(self, rows: IntArray) -> list[tuple[Size, ...]]:
        """Return the sizes in which the references of each row are counted."""
        return self.row_conditions.select(rows).references.sizes(self.sizes(rows))

    def reference_counts(self) -> OfSamples:
        """Return the number of references of each usable row."""
        if REFERENCE not in self.conditions:
            return NO_SAMPLES
        rows = np.flatnonzero(self.num_tokens > 0)
        return OfSamples(self.row_conditions.references.counts[rows], rows.tolist())

    def audio_rates(self) -> OfSamples:
        """Return the frame rate of each usable row with audio."""
        if (audio := self.row_conditions.audio) is None:
            return NO_SAMPLES
        rows = np.flatnonzero((self.num_tokens > 0) & audio.present)
        return OfSamples(audio.fps[rows], rows.tolist())


def make_data(
    config: TrainingConfig, spec: LatentSpec, tokens: ModelTokens, *, prepared: PreparedDataset | None = None
) -> TrainingData:
    """Make the loader of a prepared data set.

    Args:
        config ([`TrainingConfig`]): Settings of the run.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
        tokens ([`ModelTokens`]): What the model adds to the tokens of a sample.
        prepared ([`PreparedDataset`], *optional*): The data set, if it was read before.

    Raises:
        BucketingError: If the data set was prepared for another model, or holds no usable row.
    """
    prepared = _rows_of(config, config.dataset_dir, spec, prepared)
    check_named_sources(config, prepared.sources)
    check_marks(config, prepared)
    if _views_of(prepared) == 1 and not_default(config, "cached_views"):
        raise BucketingError(
            f"Omit `cached_views`: {config.dataset_dir} caches no views to choose from. hf_bucketing cache "
            "encodes several of each sample with --views_per_sample."
        )
    share = config.held_out.validation_split
    if share is not None:
        prepared, _ = split_rows(prepared, share)
    if config.batches.cached_views == "all" and resize_of_views(prepared) is not None:
        prepared = views_as_rows(prepared)
    return _data_of(config, prepared, tokens)


def make_held_out_data(
    config: TrainingConfig,
    spec: LatentSpec,
    tokens: ModelTokens,
    *,
    prepared: PreparedDataset | None = None,
    held_out: PreparedDataset | None = None,
) -> TrainingData | None:
    """Return the held-out rows, in order and each once; None if there are none. Arguments as of [`make_data`].

    Nothing about them is random: their crops, frames and sizes are those of no augmentation, and all tokens count.

    Raises:
        BucketingError: As [`make_data`], and if a row is also trained on.
    """
    if not config.held_out.given:
        return None
    share, folder = config.held_out.validation_split, config.held_out.validation_dataset_dir
    if share is not None:
        _, held_out = split_rows(_rows_of(config, config.dataset_dir, spec, prepared), share)
    else:
        held_out = _rows_of(config, str(folder), spec, held_out)
        if not holds_stream(config.dataset_dir):  # whose files are not known before they come
            check_apart(_rows_of(config, config.dataset_dir, spec, prepared), held_out)
    fixed = {**marked(TrainingConfig, "held_out"), **flatten(CaptionRule()), **flatten(config.views.fixed)}
    fixed |= flatten(StreamConfig())  # held-out samples are rows
    return _data_of(changed(config, **fixed), held_out, tokens, evaluation=True)


def _rows_of(
    config: TrainingConfig, folder: str, spec: LatentSpec, prepared: PreparedDataset | None
) -> PreparedDataset:
    """Return a prepared data set with the sizes and tokens that its rows have in the run's kind of batches."""
    prepared = prepared or PreparedDataset.load(folder)
    check_prepared(config, prepared, spec, folder=folder)
    if prepared.cache is not None:
        check_cached_rows(config, prepared.cache, folder=folder)
    columns = way_of(config.batches).columns(prepared)
    if columns is None:
        return prepared
    return dataclasses.replace(prepared, dataset=map_columns(prepared.dataset, columns, overwrite=True))


def _data_of(
    config: TrainingConfig, prepared: PreparedDataset, counting: ModelTokens, *, evaluation: bool = False
) -> TrainingData:
    """Count the rows, plan them, and make their loader."""
    check_reference_dropout(config, prepared, in_front=counting.references.in_front, evaluation=evaluation)
    check_audio(config, prepared)
    batches, way = config.batches, way_of(config.batches)
    cost_model = make_cost_model(config, width=counting.width)
    order = EpochConfig(seed=config.seed, evaluation=evaluation, shuffle=not evaluation)
    plan = way.plan(order, cost_model=cost_model, accumulation_steps=config.gradient_accumulation_steps)
    rows = way.fitting(_counted(config, prepared, counting, way=way), plan)
    weights = None if evaluation else _weights(prepared, views=batches.cached_views)
    sampler = way.sampler(rows, plan, weights=weights, longest_first=batches.longest_first)
    prepared = _for_replacements(config, rows, way.replacement_columns(sampler))
    collator = make_collator(way, config, prepared, resize=rows.resize, log=unreadable_log(config))
    repeats = weights is not None or (batches.remainder == "repeat" and not evaluation)
    return TrainingData(
        loader=_make_loader(config, prepared.dataset, sampler, collator, repeats=repeats),
        way=way,
        dataset=prepared.dataset,
        sampler=sampler,
        bucket_ids=rows.bucket_ids,
        table=rows.table,
        spec=prepared.spec,
        num_tokens=rows.num_tokens,
        planned_tokens=rows.tokens_to_plan,
        learned_tokens=rows.learned_tokens,
        row_conditions=rows.conditions,
        text_tokens=counting.text_tokens,
        cost_model=cost_model,
        reduction=config.objective.loss_reduction,
        texts={} if evaluation else _texts_of(config, collator, prepared),
        conditions=prepared.shown,
        sources=prepared.sources,
        source_weights=weights_of_sources(config.objective.loss_weight, prepared.sources),
        source_ids=prepared.source_ids,
        file_names=prepared.file_names,
    )


def _counted(
    config: TrainingConfig, prepared: PreparedDataset, counting: ModelTokens, *, way: Batching[Any]
) -> SampleRows:
    """Return the rows with their tokens, and with the sizes that an epoch draws of them or of their cached views."""
    batches, resize, views = config.batches, None, None
    if batches.random_resize is not None:
        resize = RandomResize(spec=prepared.spec, min_side=batches.random_resize, seed=config.seed)
    elif prepared.cache is not None and batches.cached_views == "draw":
        resize = resize_of_views(prepared)
        views = partial(views_in_turn, count=prepared.cache.views_per_sample, seed=config.seed)
    return SampleRows.of(
        prepared,
        way.table(prepared),
        counting=counting,
        rules=counting.rules_of(prepared, condition=config.objective.condition),
        drop=batches.token_drop,
        resize=resize,
        views=views,
    )


def _for_replacements(config: TrainingConfig, rows: SampleRows, columns: Mapping[str, IntArray]) -> PreparedDataset:
    """Return the rows with the columns by which unreadable ones are replaced, where conditions add to their tokens."""
    prepared = rows.prepared
    if config.faults.on_error != "replace" or not rows.conditions:
        return prepared
    dataset = with_columns(prepared.dataset, {"num_tokens": rows.num_tokens, **columns})
    return dataclasses.replace(prepared, dataset=dataset)


def _make_loader(
    config: TrainingConfig, dataset: Dataset, sampler: PlannedBatchSampler, collator: Any, *, repeats: bool
) -> DataLoader[Any]:
    """Return the loader of rows, some of which come more than once in an epoch if it `repeats` them."""
    if CACHED_VIEW in dataset.column_names:
        dataset = dataset.remove_columns([*OF_VIEWS])  # in memory, so that each worker would be sent them
    rows: Any = NumberedRows(dataset) if repeats else dataset
    return DataLoader(
        rows,
        batch_sampler=sampler,
        collate_fn=collator,
        persistent_workers=config.loader.dataloader_num_workers > 0,
        **config.loader.options(),
    )


def _texts_of(config: TrainingConfig, collator: Any, prepared: PreparedDataset) -> dict[str, TextEmbeddings]:
    """Return the texts that a run needs beside those of its rows, where they come from a cache."""
    if not isinstance(collator, CachedCollator):
        return {}
    captions = {*config.preservation.captions, *([""] if config.objective.caption_dropout else [])}
    if NULL_TEXT_KEY in prepared.dataset.column_names:
        captions -= {""}  # batches hold one of each row
        if captions:
            raise BucketingError(
                f"No cache holds the captions {quoted(sorted(captions))} of `preservation_caption` or `slider`: this "
                "model's text encoder sees the references of a sample. Train from the folder that "
                "hf_bucketing prepare wrote."
            )
    return {caption: TextEmbeddings.of_batch(collator.text_of(caption)) for caption in sorted(captions)}


def _in_epoch(tokens: IntArray | Callable[[int], IntArray], epoch: int) -> IntArray:
    """Return the tokens of rows in an epoch, `(n,)`."""
    return tokens(epoch) if callable(tokens) else tokens


def _period(plan: EpochPlan, epoch: int) -> str:
    """Return which part of an epoch a plan covers, in words."""
    return f"left of epoch {epoch}" if plan.consumed else "per epoch"


def _views_of(prepared: PreparedDataset) -> int:
    """Return the views of each row among which an epoch chooses."""
    return 1 if prepared.cache is None else prepared.cache.views_per_sample


def _describe_views(collator: Any, config: TrainingConfig) -> list[str]:
    """Return a line of text about several cached views of each sample, if there are any."""
    if not isinstance(collator, CachedCollator) or collator.info.views_per_sample == 1:
        return []
    kept = {"draw": "one drawn per epoch", "all": "each once per epoch", "first": "the first one in every epoch"}
    if collator.info.random_resize is not None:
        kept["draw"] = "of several sizes, each once in as many epochs"
    return [f"  Cached views of each sample = {collator.info.views_per_sample}, {kept[config.batches.cached_views]}"]


def _weights(prepared: PreparedDataset, *, views: Literal["draw", "all", "first"]) -> npt.NDArray[np.float64] | None:
    """Return how often each row occurs in an epoch, `(n,)`, or None for once: with all views, once with each."""
    times = _views_of(prepared) if views == "all" and CACHED_VIEW not in prepared.dataset.column_names else 1
    weights = prepared.weights
    if weights is None:
        return None if times == 1 else np.full(len(prepared.dataset), times, np.float64)
    return times * weights
