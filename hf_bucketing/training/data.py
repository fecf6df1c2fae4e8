"""Columns, sampler, collator and loader of a training run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from datasets import Dataset
from torch.utils.data import DataLoader

from ..buckets.assignment import REJECTED_BUCKET
from ..buckets.calibration import read_cost_model
from ..buckets.cost import CostModel
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..caching.collator import CachedCollator
from ..caching.columns import NULL_TEXT_KEY
from ..caching.views import CACHED_VIEW, OF_VIEWS, resize_of_views, views_as_rows, views_in_turn
from ..columns.apply import map_columns, with_columns
from ..columns.arrays import column_array
from ..columns.buckets import BucketColumns
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import holds_stream
from ..configuration.run import TrainingConfig
from ..configuration.source_weights import weights_of_sources
from ..errors import BucketingError, OversizeError, quoted
from ..loaders.bucket_sampler import BucketBatchSampler
from ..loaders.captions import CaptionRule
from ..loaders.collators import BUCKET_PART
from ..loaders.occurrences import NumberedRows
from ..loaders.pack_sampler import PackBatchSampler
from ..loaders.planned import PlannedBatchSampler, StepCount
from ..loaders.random_resize import RandomResize
from ..losses.reduction import reduction_weights
from ..media.row_audio import RowAudio
from ..media.row_references import RowReferences, appended_frames, sample_sizes
from ..models.texts import TextEmbeddings
from ..packing.token_drop import TokenDrop
from ..placement.context_parallel import prepare_in_groups
from ..plans.buckets import BucketPlanConfig
from ..plans.epoch import EpochPlan
from ..plans.packs import PackPlanConfig, are_few, sample_spans, strip_tokens
from ..randomness import ROW
from ..settings import changed, flatten, marked, not_default
from ..streaming.config import StreamConfig
from .agreement import check_same
from .collation import make_collator
from .data_checks import (
    check_audio,
    check_cached_rows,
    check_marks,
    check_named_sources,
    check_prepared,
    check_reference_dropout,
)
from .held_out import check_apart, split_rows
from .oversize import beyond_positions, exceeding, with_file, without_rows
from .run_data import LargestStep, ModelTokens, RunData, StepRows, describe_conditions

logger = get_logger(__name__)


@dataclass(kw_only=True)
class TrainingData(RunData):
    """The loader of a run whose rows are planned, its sampler, and the tokens and weight of each row.

    Attributes beside those of [`RunData`]:
        dataset (`Dataset`): The prepared rows.
        sampler ([`PlannedBatchSampler`][hf_bucketing.loaders.PlannedBatchSampler]): The loader's batch sampler.
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row in `table`.
        num_tokens (array of `int`, shape `(n,)`): Tokens of each row, at its own size or at its bucket's, with those
            of its references and of its audio.
        learned_tokens (array of `int`, shape `(n,)`, or callable of the epoch): Tokens of each row that enter the
            loss: those of its own grid.
        references ([`RowReferences`][hf_bucketing.media.row_references.RowReferences], *optional*): References of the
            rows, where samples have some.
        audio ([`RowAudio`][hf_bucketing.media.row_audio.RowAudio], *optional*): Audio of the rows, where some is
            trained.
        source_ids (array of `int`, shape `(n,)`, *optional*): Source of each row, where there are several.
        file_names (callable): Returns the names of the files of some rows, by their places in `dataset`.
    """

    dataset: Dataset
    sampler: PlannedBatchSampler
    bucket_ids: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    learned_tokens: npt.NDArray[np.int64] | Callable[[int], npt.NDArray[np.int64]]
    references: RowReferences | None = None
    audio: RowAudio | None = None
    source_ids: npt.NDArray[np.int64] | None = None
    file_names: Callable[[Sequence[int]], list[str]]

    def counts_by_source(self, plan: EpochPlan) -> dict[str, dict[str, int]]:
        """Return the counts of each source in a plan, by name; none without several sources."""
        return {} if self.source_ids is None else plan.counts_by_group(self.source_ids, self.sources)

    def tokens_of(self, rows: npt.NDArray[np.int64], *, epoch: int) -> npt.NDArray[np.int64]:
        """Return the tokens of rows, `(n,)`; they change with the epoch where sizes are drawn at random."""
        if isinstance(self.sampler, PackBatchSampler):
            return self.sampler.tokens_in(epoch)[rows]
        return self.num_tokens[rows]

    def lengths_of(self, rows: npt.NDArray[np.int64], *, epoch: int) -> npt.NDArray[np.int64]:
        """Return the tokens of rows and of the text in their sequence, `(n,)`: what a step of them takes."""
        return self.tokens_of(rows, epoch=epoch) + self.text_tokens

    def rows_of(self, loader: Any, batch: Mapping[str, Any], *, epoch: int) -> StepRows:
        """Return what a batch of the plan counts for."""
        rows = loader.rows_of_step(loader.step - 1)
        return StepRows(
            tokens=self.lengths_of(rows, epoch=epoch),
            weights=self.loss_weights(rows, epoch=epoch),
            total=float(self.loss_weights(loader.rows_in_window, epoch=epoch).sum()),
            sources=None if self.source_ids is None else self.source_ids[rows],
        )

    def loss_weights(self, rows: npt.NDArray[np.int64], *, epoch: int) -> torch.Tensor:
        """Return the weights of the losses of rows, `(n,)`."""
        learned = self.learned_tokens(epoch) if callable(self.learned_tokens) else self.learned_tokens
        weights = reduction_weights(torch.from_numpy(learned[rows]), self.reduction)
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
        each = config.gradient_accumulation_steps
        now = math.ceil(len(loader) / each) if loader.epoch < config.num_train_epochs else 0
        later = self.sampler.count_steps(loader.epoch + 1, config.num_train_epochs, accumulation_steps=each)
        return StepCount(now + later.steps, later.exact)

    def largest_step(self) -> LargestStep:
        """Return the largest step of the present epoch."""
        plan = self.sampler.plan()
        lengths = np.add.reduceat(self.lengths_of(plan.indices, epoch=self.sampler.epoch), plan.offsets[:-1])
        most = int(lengths.argmax())
        rows = plan.batch(most)
        return self.step_of(rows, tokens=int(lengths[most]))

    def step_of(self, rows: npt.NDArray[np.int64], *, tokens: int) -> LargestStep:
        """Return the step that some rows make, which takes as many tokens."""
        sizes, appended = self.sizes(rows), []
        if self.references is not None:
            appended = appended_frames(self.references.rule, sizes, spec=self.spec).tolist()
        return LargestStep(sizes, tokens, self.reference_sizes(rows), audio=self.audio_tokens(rows), appended=appended)

    def epoch_summary(self, loader: Any) -> Mapping[str, Any]:
        """Return the counts of the plan of the present epoch, for the log."""
        of_sources = self.counts_by_source(loader.plan)
        return {**loader.plan.summary(), **({"sources": of_sources} if of_sources else {})}

    def after_epoch(self, loader: Any, accelerator: Accelerator, *, num_batches: int) -> list[str]:
        """Return no line of text: the plan said all of an epoch."""
        return []

    def describe(self, config: TrainingConfig, *, accelerator: Accelerator, max_train_steps: str) -> list[str]:
        """Return the plan of the first epoch and its cost, as lines of text."""
        plan, batches, epoch = self.sampler.plan(), config.batches, self.sampler.epoch
        if not plan.num_steps:  # resumed on another number of processes at the end of an epoch
            epoch += 1
            plan = self.sampler.plan(epoch)
        of_samples = self.lengths_of(plan.indices, epoch=epoch)
        tokens = np.add.reduceat(of_samples, plan.offsets[:-1])
        costs = self.cost_model.pack_cost(of_samples, plan.offsets).reshape(plan.num_steps, -1)
        degree = config.memory.context_parallel_degree
        mixed = f", {plan.num_mixed_steps} of them mixed" if batches.batching == "bucket" else ""
        dropped = ", ".join(f"{count} {reason}" for reason, count in plan.drop_reasons.items()) or "none"
        limit = batches.token_limit
        fill = "" if limit is None else f", {tokens.mean() / limit:.1%} of {limit} filled"
        period = f"left of epoch {epoch}" if plan.consumed else "per epoch"
        groups = f", in groups of {degree} that share their samples" if degree > 1 else ""
        return [
            f"  Num processes = {accelerator.num_processes}{groups}",
            f"  Batching = {batches.batching}, mixed precision = {accelerator.mixed_precision}",
            f"  Samples {period} = {plan.kept} kept, {plan.repeated} repeated, dropped: {dropped}",
            *(
                f"    of {name} = {counts['kept']} kept, {counts['repeated']} repeated, {counts['dropped']} dropped"
                for name, counts in self.counts_by_source(plan).items()
            ),
            *_describe_views(self.loader.collate_fn, config),
            *describe_conditions(self.conditions),
            f"  Steps {period} = {plan.num_steps} on each process{mixed}",
            f"  Tokens per step and process = {tokens.mean():.0f} on average, {tokens.max()} at most{fill}",
            f"  Efficiency over processes = {costs.mean(1).sum() / costs.max(1).sum():.1%} (mean ÷ largest cost)",
            f"  Optimizer steps = {max_train_steps}",
        ]

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
        return None if self.audio is None else int(self.audio.present[self.num_tokens > 0].sum())

    @property
    def frame_rates(self) -> npt.NDArray[np.float64]:
        """Frames per second of the usable rows, `(n,)`, 0 for images."""
        return column_array(self.dataset, "fps")[self.num_tokens > 0]

    @property
    def rejections(self) -> npt.NDArray[Any]:
        """Reason why each row has no bucket, `(n,)`."""
        return column_array(self.dataset, "rejection")

    def sizes(self, rows: npt.NDArray[np.int64]) -> list[Size]:
        """Return the target size of each row."""
        return [self.table.size(int(self.bucket_ids[row])) for row in rows]

    def reference_sizes(self, rows: npt.NDArray[np.int64]) -> list[tuple[Size, ...]]:
        """Return the sizes in which the references of each row are counted."""
        if self.references is None:
            return [()] * len(rows)
        return self.references.select(rows).sizes(self.sizes(rows))

    def audio_tokens(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return the tokens of the audio of each row; an empty list where none is trained."""
        if self.audio is None:
            return []
        return self.audio.select(rows).num_tokens([size.frames for size in self.sizes(rows)]).tolist()

    def check_references(self, check: Callable[[npt.NDArray[np.int64], Sequence[Any]], None]) -> None:
        """Call a function with the numbers of references of the usable rows, and the numbers of these rows."""
        if self.references is not None:
            rows = np.flatnonzero(self.num_tokens > 0)
            check(self.references.counts[rows], rows.tolist())

    def check_audio_rates(self, check: Callable[[npt.NDArray[np.float64], Sequence[Any]], None]) -> None:
        """Call a function with the frame rates of the usable rows that have audio, and the numbers of these rows."""
        if self.audio is not None:
            rows = np.flatnonzero((self.num_tokens > 0) & self.audio.present)
            check(self.audio.fps[rows], rows.tolist())


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
    if config.batches.batching == "bucket":
        return prepared
    columns = BucketColumns(prepared.open_table, spec)
    return dataclasses.replace(prepared, dataset=map_columns(prepared.dataset, columns, overwrite=True))


def _data_of(
    config: TrainingConfig,
    prepared: PreparedDataset,
    counting: ModelTokens,
    *,
    evaluation: bool = False,
) -> TrainingData:
    batches, dataset = config.batches, prepared.dataset
    check_reference_dropout(config, prepared, in_front=counting.references_in_front, evaluation=evaluation)
    spec = prepared.spec
    rule = counting.rule_of(prepared, condition=config.objective.condition)
    references = None if rule is None else prepared.row_references(rule)
    table: BucketTable | OpenTable = prepared.table if batches.batching == "bucket" else prepared.open_table
    bucket_ids, num_tokens = (column_array(dataset, name).astype(np.int64) for name in ("bucket_id", "num_tokens"))
    own_tokens = counted_tokens(bucket_ids, num_tokens, table=table, spec=spec, drop=batches.token_drop)
    num_tokens = own_tokens
    if references is not None:
        num_tokens = own_tokens + references.num_tokens(sample_sizes(bucket_ids, table), spec=spec)
    check_audio(config, prepared)
    audio = prepared.row_audio
    if audio is not None:
        num_tokens = num_tokens + audio.num_tokens(sample_sizes(bucket_ids, table)[:, 0])
    cost_model = make_cost_model(config, width=counting.width)
    resize, views = None, None
    if batches.random_resize is not None:
        resize = RandomResize(spec=spec, min_side=batches.random_resize, seed=config.seed)
    elif prepared.cache is not None and batches.cached_views == "draw":
        resize = resize_of_views(prepared)
        views = partial(views_in_turn, count=prepared.cache.views_per_sample, seed=config.seed)
    order: dict[str, Any] = {"seed": config.seed, "evaluation": evaluation, "shuffle": not evaluation}
    packs = _pack_plan(config, cost_model, order)
    if packs is not None:
        prepared, rejected = _without_oversize(
            config, prepared, None if resize is not None else packs, num_tokens, counting=counting
        )
        dataset, bucket_ids = prepared.dataset, np.where(rejected, REJECTED_BUCKET, bucket_ids)
        own_tokens, num_tokens = np.where(rejected, 0, own_tokens), np.where(rejected, 0, num_tokens)
    learned: npt.NDArray[np.int64] | Callable[[int], npt.NDArray[np.int64]] = own_tokens
    sampler: PlannedBatchSampler
    weights = None if evaluation else _weights(prepared, views=batches.cached_views)
    common: dict[str, Any] = {
        "rejection": dataset["rejection"],
        "weights": weights,
        "text_tokens": counting.text_tokens,
        "longest_first": batches.longest_first,
    }
    if packs is None:
        buckets = BucketPlanConfig(**vars(batches.bucket_limits), remainder=batches.remainder, **order)
        sampler = BucketBatchSampler(
            bucket_ids, table=table, config=buckets, spec=spec, references=references, audio=audio, **common
        )
    else:
        sides = ("num_frames", "height", "width")
        sizes: dict[str, Any] = {name: np.where(rejected, -1, column_array(dataset, name)) for name in sides}
        sizes["index"] = column_array(dataset, ROW)
        sizes["num_frames"] = prepared.open_table.cut(sizes["num_frames"])
        tokens: npt.NDArray[np.int64] | Callable[[int], npt.NDArray[np.int64]] = num_tokens
        if resize is not None:
            tokens = resize.token_counter(**sizes, references=references, audio=audio, views=views)
            learned = resize.token_counter(**sizes, views=views)
        try:
            sampler = PackBatchSampler(tokens, config=packs, **common)
        except OversizeError as error:
            advice = _frames_that_fit(
                prepared, packs, references=references, drop=batches.token_drop, text_tokens=counting.text_tokens
            )
            raise with_file(error, prepared, advice=advice) from error
    if (references is not None or audio is not None) and config.faults.on_error == "replace":
        counted = {"num_tokens": num_tokens}  # by which replacements are chosen
        if isinstance(sampler, BucketBatchSampler) and sampler.parts is not None:
            counted[BUCKET_PART] = sampler.parts.ids
        dataset = with_columns(dataset, counted)
        prepared = dataclasses.replace(prepared, dataset=dataset)
    collator = make_collator(config, prepared, table=table, resize=resize)
    texts = {}
    if isinstance(collator, CachedCollator) and not evaluation:
        captions = {*config.preservation.captions, *([""] if config.objective.caption_dropout else [])}
        if NULL_TEXT_KEY in dataset.column_names:
            captions -= {""}  # batches hold one of each row
        if NULL_TEXT_KEY in dataset.column_names and captions:
            raise BucketingError(
                f"No cache holds the captions {quoted(sorted(captions))} of `preservation_caption` or `slider`: this "
                "model's text encoder sees the references of a sample. Train from the folder that "
                "hf_bucketing prepare wrote."
            )
        texts = {caption: TextEmbeddings.of_batch(collator.text_of(caption)) for caption in sorted(captions)}
    repeats = weights is not None or (batches.remainder == "repeat" and not evaluation)
    rows: Any = dataset
    if CACHED_VIEW in dataset.column_names:
        rows = rows.remove_columns([*OF_VIEWS])  # in memory, so that each worker would be sent them
    rows = NumberedRows(rows) if repeats else rows
    loader: DataLoader[Any] = DataLoader(
        rows,
        batch_sampler=sampler,
        collate_fn=collator,
        persistent_workers=config.loader.dataloader_num_workers > 0,
        **config.loader.options(),
    )
    return TrainingData(
        loader=loader,
        dataset=dataset,
        sampler=sampler,
        bucket_ids=bucket_ids,
        table=table,
        spec=spec,
        num_tokens=num_tokens,
        learned_tokens=learned,
        references=references,
        audio=audio,
        text_tokens=counting.text_tokens,
        cost_model=cost_model,
        reduction=config.objective.loss_reduction,
        texts=texts,
        conditions=prepared.shown,
        sources=prepared.sources,
        source_weights=weights_of_sources(config.objective.loss_weight, prepared.sources),
        source_ids=prepared.source_ids,
        file_names=prepared.file_names,
    )


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


def _pack_plan(config: TrainingConfig, cost_model: CostModel, order: Mapping[str, Any]) -> PackPlanConfig | None:
    """Return the settings of the plan of packs; None for buckets."""
    batches = config.batches
    if batches.batching == "bucket":
        return None
    return PackPlanConfig(
        **vars(batches.pack_limits),
        strategy=batches.pack_strategy,
        balance=batches.balance,
        cost_model=cost_model if batches.balance == "cost" else None,
        accumulation_steps=config.gradient_accumulation_steps,
        oversize="own_batch" if order["evaluation"] else "error",  # without gradients, it takes less memory
        **order,
    )


def _without_oversize(
    config: TrainingConfig,
    prepared: PreparedDataset,
    packs: PackPlanConfig | None,
    num_tokens: npt.NDArray[np.int64],
    *,
    counting: ModelTokens,
) -> tuple[PreparedDataset, npt.NDArray[np.bool_]]:
    """Reject the few rows that fit no pack, by the model's positions or, where they are given, by the limits of packs.

    Many are left as they are, so that the checks which follow refuse them.

    Returns:
        The data set, and which rows are rejected now, `(n,)`.
    """
    rejected = np.zeros(len(num_tokens), np.bool_)
    if counting.refuse is not None and config.batches.base_size is None:  # stretched positions fit any sample
        ids = column_array(prepared.dataset, "bucket_id").astype(np.int64)
        beyond = beyond_positions(ids, prepared.open_table, counting.refuse) & (num_tokens > 0)
        if are_few(beyond, num_tokens):
            first = prepared.open_table.size(int(ids[beyond.argmax()]))
            why = f"{counting.refuse(prepared.spec.grid(first))} Make the files smaller, or train in buckets."
            prepared, rejected = without_rows(prepared, beyond, why=why), beyond
            num_tokens = np.where(rejected, 0, num_tokens)
    if packs is not None and packs.oversize == "error":
        over = exceeding(num_tokens, packs, text_tokens=counting.text_tokens)
        if are_few(over, num_tokens):
            most = strip_tokens(int(num_tokens.max()), packs.strip_length) + counting.text_tokens
            why = f"The largest takes {most:,} tokens, and a pack {packs.max_tokens:,}; raise --max_tokens, or cut "
            why += "videos with --max_frames of hf_bucketing prepare."
            prepared, rejected = without_rows(prepared, over, why=why), rejected | over
    return prepared, rejected


def _frames_that_fit(
    prepared: PreparedDataset,
    packs: PackPlanConfig,
    *,
    references: RowReferences | None,
    drop: TokenDrop | None,
    text_tokens: int,
) -> list[str]:
    """Return advice on rows whose tokens exceed `max_tokens`: numbers of frames, with the rows that each keeps."""
    rows = np.stack([column_array(prepared.dataset, name) for name in ("num_frames", "height", "width")])
    limits = dataclasses.replace(packs, oversize="own_batch")
    sizes, of_row = np.unique(rows, axis=1, return_inverse=True)
    spec, audio = prepared.spec, prepared.row_audio

    def fitting(max_frames: int) -> int:
        table = dataclasses.replace(prepared.open_table, max_frames=max_frames)
        ids = table.assign(*sizes).bucket_id.astype(np.int64)
        own = table.num_tokens(ids, spec=spec)
        tokens = counted_tokens(ids, own, table=table, spec=spec, drop=drop)[of_row.ravel()]
        if references is not None:
            tokens = tokens + references.num_tokens(sample_sizes(ids, table)[of_row.ravel()], spec=spec)
        if audio is not None:
            tokens = tokens + audio.num_tokens(sample_sizes(ids[of_row.ravel()], table)[:, 0])
        _, over = sample_spans(tokens, limits, text_tokens=text_tokens)
        return int(np.count_nonzero((tokens > 0) & ~over))

    longest = int(prepared.open_table.cut(rows[0]).max())
    valid = sorted({spec.snap(Size(frames, 1, 1)).frames for frames in range(1, longest + 1)}, reverse=True)
    most_frames: dict[int, int] = {}
    for frames in valid:
        most_frames.setdefault(fitting(frames), frames)
    most_frames.pop(fitting(longest))  # as many rows as now
    if not most_frames:
        return ["use smaller files", "train in buckets, which crop them (--batching bucket)"]
    fewest, most = min(most_frames), max(most_frames)
    options = [f"--max_frames {most_frames[rows]} (keeps {rows:,} rows)" for rows in dict.fromkeys((fewest, most))]
    return [
        f"prepare again with {' or '.join(options)}",
        f"with --clips all --clip_frames {most_frames[most]} beside it, which makes several samples of a long video",
    ]


def make_cost_model(config: TrainingConfig, *, width: int) -> CostModel:
    """Return the cost of tokens in a model of a width, or as a run measured it."""
    measured = config.batches.cost_model
    return CostModel.for_transformer(width) if measured is None else read_cost_model(measured)


def counted_tokens(
    bucket_ids: npt.NDArray[np.int64],
    num_tokens: npt.NDArray[np.int64],
    *,
    table: BucketTable | OpenTable,
    spec: LatentSpec,
    drop: TokenDrop | None,
) -> npt.NDArray[np.int64]:
    """Return the tokens of each row's own grid to plan with: those that token drop keeps.

    A fixed rate keeps as many whatever the seed. Rows of 0 `num_tokens` keep 0.
    """
    if drop is None:
        return num_tokens
    usable = num_tokens > 0
    ids, buckets = np.unique(bucket_ids[usable], return_inverse=True)
    kept = num_tokens.copy()
    grids = [spec.grid(table.size(bucket_id)) for bucket_id in ids.tolist()]
    kept[usable] = np.array(drop.num_kept(grids, seeds=[0] * len(grids)), np.int64)[buckets]
    return kept
