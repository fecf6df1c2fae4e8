"""Batches of a training run from a stream: what is known of them as they come, and what is not known before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from datasets import IterableDataset

from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec, Size
from ..columns.apply import map_columns
from ..columns.arrays import column_array
from ..columns.prepared import ROW_WEIGHT, PreparedDataset
from ..columns.prepared_stream import PreparedStream, StreamSample, holds_stream
from ..columns.sources import SAMPLED_ROWS, bytes_in
from ..conditions.appended import AppendedFrames
from ..conditions.audio import HAS_AUDIO, AudioRule
from ..conditions.names import REFERENCE
from ..conditions.references import REFERENCE_SIZES, ReferenceRule
from ..conditions.rows import ConditionRules, RowConditions, tokens_with
from ..configuration.objective import weights_of_sources
from ..configuration.run import TrainingConfig
from ..errors import BucketingError
from ..loaders.planned import StepCount
from ..losses.per_sample import reduction_weights
from ..media import references as references_before, row_audio
from ..media.rows import SOURCE
from ..models.condition_checks import NO_SAMPLES, OfSamples
from ..packing.token_drop import TokenDrop
from ..randomness import Purpose, integer_seed
from ..streaming.batcher import StreamingBucketBatcher
from ..streaming.config import warn_of_shards
from ..units import format_bytes
from . import way_of
from .checks import check_audio, check_named_sources, check_prepared, check_reference_dropout
from .run_data import LargestStep, RunData, StepRows, make_cost_model, unreadable_log
from .sample_rows import ModelTokens, counted_tokens
from .ways import media_collator

logger = get_logger(__name__)

_MAPPED_ROWS = 64
"""Rows of a prepared folder whose columns are computed at once, as they may hold their files."""


class OpenedStream(NamedTuple):
    """A stream whose files were found, before weights are loaded.

    Attributes:
        prepared ([`PreparedStream`] or [`PreparedDataset`]): Description of the stream, or the folder of its rows.
        dataset (`IterableDataset`): Its rows.
        sample ([`StreamSample`]): Its first rows.
    """

    prepared: PreparedStream | PreparedDataset
    dataset: IterableDataset
    sample: StreamSample


def open_stream(
    config: TrainingConfig, accelerator: Accelerator, *, taken: ReferenceRule | None = None
) -> OpenedStream:
    """Open the stream of a run and warn of shards that do not divide among its processes and workers.

    Args:
        config ([`TrainingConfig`]): Settings of the run.
        accelerator (`Accelerator`): Its processes.
        taken ([`ReferenceRule`][hf_bucketing.conditions.references.ReferenceRule], *optional*): References that the
            model takes; rows with others are at fault. By default those of the model that the stream was prepared for.

    Raises:
        BucketingError: If files are gone, the folder holds what only a plan can draw, or DeepSpeed runs.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise BucketingError(
            "Omit `streaming` under DeepSpeed, or train with DDP or FSDP: the weights of a window's samples are known "
            "when it ends, but DeepSpeed then has applied its gradients."
        )
    stream, way = config.stream, way_of(config.batches)
    way.check_stream()
    num_workers = config.loader.dataloader_num_workers
    if holds_stream(config.dataset_dir):
        prepared = PreparedStream.load(config.dataset_dir)
        if taken is not None:
            numbers = {name: getattr(taken, name) for name in ("least", "most", "min_side", "max_ratio")}
            prepared = replace(prepared, references=replace(prepared.references, **numbers))
        reject = config.faults.on_error == "replace"
        rows = prepared.open(
            packed=not way.stacks, shuffle_buffer=stream.shuffle_buffer, seed=config.seed, reject=reject
        )
        for warning in warn_of_shards(
            rows.num_shards, num_processes=accelerator.num_processes, num_workers=num_workers
        ):
            logger.warning(warning)
        return OpenedStream(prepared, rows, prepared.sample)
    folder = PreparedDataset.load(config.dataset_dir)
    rows = _rows_of_folder(config, folder, num_shards=accelerator.num_processes * max(1, num_workers))
    return OpenedStream(folder, rows, _sample_of(folder))


def _rows_of_folder(config: TrainingConfig, prepared: PreparedDataset, *, num_shards: int) -> IterableDataset:
    """Return the rows of a prepared folder as a stream, in as many shards as read them."""
    if prepared.cache is not None or ROW_WEIGHT in prepared.dataset.column_names:
        what = "encoded latents" if prepared.cache is not None else "rows that occur other than once per epoch"
        raise BucketingError(f"{config.dataset_dir} holds {what}, which only a plan draws; omit `streaming`.")
    rows = prepared.dataset.to_iterable_dataset(num_shards=min(num_shards, len(prepared.dataset)))
    if config.stream.shuffle_buffer:
        seed = integer_seed(Purpose.STREAM, config.seed)
        rows = rows.shuffle(seed=seed, buffer_size=config.stream.shuffle_buffer)
    columns = way_of(config.batches).columns(prepared)
    if columns is not None:
        rows = map_columns(rows, columns, batch_size=_MAPPED_ROWS, overwrite=True)
    return rows


def _sample_of(prepared: PreparedDataset) -> StreamSample:
    """Return what the first rows of a prepared folder are like."""
    rows = prepared.dataset.with_format(None).select(range(min(SAMPLED_ROWS, len(prepared.dataset))))
    names = ("num_frames", "height", "width", "fps", "bucket_id", REFERENCE_SIZES, HAS_AUDIO)
    columns = {name: column_array(rows, name) for name in names if name in rows.column_names}
    return StreamSample.of(columns, row_bytes=sum(map(bytes_in, rows)) // len(rows))


@dataclass(kw_only=True)
class StreamedData(RunData):
    """The loader of a run that draws from a stream, which accelerate does not prepare, and what its batches count for.

    Attributes beside those of [`RunData`]:
        stream ([`StreamingBucketBatcher`]): The stream.
        sample ([`StreamSample`]): First rows of the stream.
        token_drop ([`TokenDrop`], *optional*): Tokens of packed samples that training drops.
        rules ([`ConditionRules`][hf_bucketing.conditions.rows.ConditionRules]): How conditions are counted.
    """

    stream: StreamingBucketBatcher
    sample: StreamSample
    token_drop: TokenDrop | None
    rules: ConditionRules
    _on_new_buckets: Callable[[Mapping[int, int]], None] = lambda counts: None
    _seen: set[int] = field(default_factory=set)

    def check_buckets(self, check: Callable[[Mapping[int, int]], None]) -> None:
        """Call a function with the buckets of the first rows, and with others when samples of them come."""
        super().check_buckets(check)
        self._on_new_buckets = check

    def prepare(self, accelerator: Accelerator, model: Any, optimizer: Any, *, degree: int) -> tuple[Any, Any, Any]:
        """Let accelerate prepare a model and its optimizer; processes never share batches of a stream."""
        return *accelerator.prepare(model, optimizer), self.loader

    def check_same(self, accelerator: Accelerator) -> None:
        """Check nothing: the rows of a stream are not known before they come."""

    def rows_of(self, loader: Any, batch: Mapping[str, Any], *, epoch: int) -> StepRows:
        """Return what a batch counts for: nothing if it only repeats the process's last one."""
        sizes = batch["size"]
        ids = [batch["bucket_id"]] * len(sizes) if "bucket_id" in batch else self._buckets_of(sizes)
        if new := {bucket: ids.count(bucket) for bucket in set(ids) - self._seen}:
            self._on_new_buckets(new)
            self._seen |= new.keys()
        tokens = self._tokens(sizes)
        weights = reduction_weights(torch.from_numpy(tokens), self.reduction) * batch["weight"].cpu()
        sources = None
        if self.sources:
            sources = np.array([self.sources.index(name) for name in batch[SOURCE]], np.int64)
            weights = self.weigh_sources(weights, sources)
        tokens = tokens + self.rules.rows(batch, num_rows=len(sizes)).num_tokens(sizes, spec=self.spec)
        return StepRows(tokens=tokens + self.text_tokens, weights=weights, total=None, sources=sources)

    def bucket_counts(self) -> dict[int, int]:
        """Return the buckets of the first rows, each with its number of rows."""
        return self.way.buckets_of(self.sample, self.table)

    def steps_left(self, loader: Any, config: TrainingConfig, *, finished: int) -> StepCount:
        """Return the optimizer steps that are left of those of all epochs, however many rows each epoch had."""
        assert config.stream.steps_per_epoch is not None, "TrainingConfig checks it"
        steps_of_epoch = -(-config.stream.steps_per_epoch // config.gradient_accumulation_steps)
        return StepCount(config.num_train_epochs * steps_of_epoch - finished, True)

    def reference_counts(self) -> OfSamples:
        """Return the number of references of each of the first rows."""
        if REFERENCE not in self.conditions:
            return NO_SAMPLES
        counts = np.array([len(sizes) // 3 for sizes in self.sample.references], np.int64)
        return OfSamples(counts, ["one of the first"] * len(counts))

    def audio_rates(self) -> OfSamples:
        """Return the lowest and the highest frame rate of the first rows that have audio."""
        rates = [rate for rate in (self.sample.audio_fps, self.sample.fastest_audio_fps) if rate is not None]
        return OfSamples(np.array(rates), ["one of the first"] * len(rates))

    def largest_step(self) -> LargestStep:
        """Return the largest step that can come: one bucket of the table, or a pack of one of the first rows."""
        largest = LargestStep([], 0, RowConditions(num_rows=0))
        seen = self.sample.conditions(self.rules)
        for bucket in self.way.possible_buckets(self.sample, self.table):
            size = self.table.size(bucket)
            tokens = int(self._tokens([size])[0])
            conditions = seen.most(size, spec=self.spec)
            condition_tokens = int(conditions.num_tokens(size, spec=self.spec)[0])
            count = self.way.largest_batch(
                self.stream.grouping, bucket, tokens=tokens, condition_tokens=condition_tokens
            )
            step = LargestStep(
                [size] * count, count * (tokens + condition_tokens + self.text_tokens), conditions.select([0] * count)
            )
            largest = max(largest, step, key=lambda step: step.tokens)
        return largest

    def epoch_summary(self, loader: Any) -> Mapping[str, Any]:
        """Return what is known of an epoch before it comes, for the log."""
        summary = {"num_processes": self.stream.num_processes, "pass_began": loader.began}
        return {**summary, "sources": {name: {} for name in self.sources}} if self.sources else summary

    def describe_samples(self, config: TrainingConfig) -> list[str]:
        """Return what is known of the shards, the rows and the sources before they come."""
        shards, processes = self.stream.num_shards, self.stream.num_processes
        readers = f"{shards // processes} per process" if shards % processes == 0 else "all read by every process"
        assigned = sum(self.sample.buckets.values())
        rows = f"not known before they come; of the first {self.sample.rows}, {assigned} have a bucket"
        return [
            f"  Stream = {shards} shards, {readers}; {self._order(config.stream.shuffle_buffer)}",
            f"  Samples per epoch = {rows}",
            *([f"  Sources = {', '.join(self.sources)}"] if self.sources else []),
        ]

    def describe_steps(self, config: TrainingConfig) -> list[str]:
        """Return how many steps an epoch has, what is most in each, and how many rows wait for one."""
        stream, batches = config.stream, config.batches
        steps = "those of one pass over all rows"
        if stream.steps_per_epoch is not None:
            steps = f"{stream.steps_per_epoch} on each process, fewer where the rows end"
        most = f"{batches.train_batch_size} samples" if batches.max_tokens is None else f"{batches.token_limit} tokens"
        return [
            f"  Steps per epoch = {steps}",
            f"  Most per step and process = {most}",
            f"  Rows that wait in each worker = at most {stream.max_buffered}, or "
            f"{format_bytes(stream.max_buffered_bytes)}",
        ]

    def describe_limits(self, config: TrainingConfig) -> list[str]:
        """Return what a stream cannot do."""
        lines = [
            "  Limits of a stream = processes may take other buckets in one step; a process whose rows end first "
            "repeats its last batch with weight 0; it resumes on as many processes and workers only",
        ]
        if config.stream.shuffle_buffer:
            when = "resuming" if config.stream.steps_per_epoch is None else "resuming, and each further epoch,"
            lines.append(f"  Limit of the shuffle buffer = {when} reads all rows since the start of the pass again")
        return lines

    def _order(self, shuffle_buffer: int) -> str:
        if not shuffle_buffer:
            return "rows in the order of the files"
        size = format_bytes(shuffle_buffer * self.sample.row_bytes)
        return f"rows shuffled among {shuffle_buffer} in each worker, about {size}"

    def after_epoch(self, loader: Any, accelerator: Accelerator, *, num_batches: int) -> list[str]:
        """Return what came of an epoch that ended, as lines of text; all processes call it together.

        Raises:
            BucketingError: If no row came.
        """
        unused = torch.tensor([loader.rejected, loader.unreadable], device=accelerator.device)
        rejected, unreadable = accelerator.reduce(unused, "sum").tolist()
        if not num_batches:
            raise BucketingError(
                f"No row of the stream can be trained: it ended after {rejected} rejected and {unreadable} unreadable "
                "rows; prepare it again with other buckets."
            )
        counts = {"were rejected": rejected, "could not be read": unreadable}
        return [f"{count} rows of the stream {what} so far in this pass" for what, count in counts.items() if count]

    def _tokens(self, sizes: Sequence[Size]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the tokens of samples, or those that token drop keeps."""
        grids = [self.spec.grid(Size(*size)) for size in sizes]
        if self.token_drop is not None:
            return np.array(self.token_drop.num_kept(grids, seeds=[0] * len(grids)), np.int64)
        return np.array(grids, np.int64).prod(axis=1)

    def _buckets_of(self, sizes: Sequence[Size]) -> list[int]:
        ids: list[int] = self.table.assign(*np.array(sizes).T).bucket_id.tolist()
        return ids


def make_streamed_data(
    config: TrainingConfig, spec: LatentSpec, tokens: ModelTokens, *, opened: OpenedStream
) -> StreamedData:
    """Make the loader of an opened stream; arguments as in [`make_data`][hf_bucketing.batching.rows.make_data].

    Raises:
        BucketingError: If the stream was prepared for another model, or a sample of it exceeds `max_tokens`.
    """
    prepared, rows, sample = opened
    check_prepared(config, prepared, spec, folder=config.dataset_dir)
    check_named_sources(config, prepared.sources)
    check_reference_dropout(config, prepared, in_front=tokens.references.in_front)
    check_audio(config, prepared)
    rules = tokens.rules_of(prepared, condition=config.objective.condition)
    way = way_of(config.batches)
    table = way.table(prepared)
    grouping = way.grouping(prepared, text_tokens=tokens.text_tokens, conditions=rules)
    way.check_grouping(grouping, sample)
    batcher = StreamingBucketBatcher(
        rows if way.stacks else _counted(config, rows, prepared, rules=rules),
        grouping,
        collate_fn=media_collator(way, config, prepared),
        config=config.stream,
        faults=config.faults.log(unreadable_log(config)),
        kept=rules.columns,
    )
    return StreamedData(
        loader=batcher.make_loader(**config.loader.options()),
        way=way,
        stream=batcher,
        table=table,
        spec=spec,
        sample=sample,
        text_tokens=tokens.text_tokens,
        cost_model=make_cost_model(config, width=tokens.width),
        reduction=config.objective.loss_reduction,
        token_drop=config.batches.token_drop,
        rules=rules,
        conditions=prepared.shown,
        sources=prepared.sources,
        source_weights=weights_of_sources(config.objective.loss_weight, prepared.sources),
    )


def _counted(
    config: TrainingConfig,
    rows: IterableDataset,
    prepared: PreparedDataset | PreparedStream,
    *,
    rules: ConditionRules,
) -> IterableDataset:
    """Return the rows of a stream with the tokens that they are grouped by, where these are not those of the rows."""
    drop = config.batches.token_drop
    if drop is None and not rules:
        return rows
    counted = _CountedTokens(drop=drop, table=prepared.open_table, spec=prepared.spec, rules=rules)
    return rows.map(counted, batched=True, batch_size=_MAPPED_ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CountedTokens:
    """Replace the tokens of rows by those of [`counted_tokens`] and of their conditions; a batch function."""

    drop: TokenDrop | None
    table: OpenTable
    spec: LatentSpec
    rules: ConditionRules

    @property
    def identity(self) -> Any:
        """What a saved stream knows this function by: its values, as earlier releases held them."""
        references, audio = self.rules.rule_of(ReferenceRule), self.rules.rule_of(AudioRule)
        known = _KnownAs(
            self.drop,
            self.table,
            self.spec,
            None if references is None else references_before.ReferenceRule.of(references),
            None if audio is None else row_audio.AudioRule.of(audio),
        )
        frames = self.rules.rule_of(AppendedFrames)
        return known if frames is None else (known, *frames)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[int]]:
        ids, tokens = (np.array(batch[name], np.int64) for name in ("bucket_id", "num_tokens"))
        own = counted_tokens(ids, tokens, table=self.table, spec=self.spec, drop=self.drop)
        conditions = self.rules.rows(batch, num_rows=len(ids))
        counted = tokens_with(conditions, own, ids, table=self.table, spec=self.spec)
        return {"num_tokens": counted.tolist()}


@dataclass(frozen=True, slots=True)
class _KnownAs:
    """Hold the values of [`_CountedTokens`] as a digest holds them, which names the module where that first was."""

    drop: TokenDrop | None
    table: OpenTable
    spec: LatentSpec
    references: Any
    audio: Any


_KnownAs.__module__, _KnownAs.__qualname__ = "hf_bucketing.training.streamed", "_CountedTokens"
