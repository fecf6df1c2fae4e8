"""Ways of batching whose samples keep their own size, by the packing of a transformer: packs, and padded lengths."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch

from ..buckets.arrays import IntArray
from ..buckets.cost import CostModel
from ..buckets.open_table import OpenTable
from ..buckets.sizes import Size
from ..columns.arrays import column_array
from ..columns.buckets import BucketColumns
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream, StreamSample
from ..conditions.rows import ConditionRules, tokens_with
from ..errors import BucketingError, OversizeError, PackingError
from ..loaders.collators import PackCollator
from ..loaders.length_sampler import LengthBatchSampler
from ..loaders.pack_sampler import PackBatchSampler
from ..loaders.random_resize import RandomResize
from ..loaders.row_column import warn_of_rejected
from ..models.enable import disable_packing, enable_packing, packing_disabled
from ..models.recipe import Recipe
from ..models.samples import Samples
from ..packing.forward import packed_forward, packed_forward_with_audio
from ..packing.names import Grid
from ..packing.pack import Packing
from ..packing.token_drop import Seed, TokenDrop
from ..plans.lengths import LengthPlanConfig
from ..plans.packs import PackPlanConfig, are_few, sample_spans, strip_tokens
from ..plans.rows import EpochConfig
from ..plans.ways import CachedAs
from ..streaming.grouping import Grouping, PackGrouping
from .drawing import loss_weights
from .sample_rows import SampleRows, Table, beyond_positions, counted_tokens, exceeding, with_file
from .steps import Computed, Prediction, Step
from .way import Batching, Plan


@dataclass(kw_only=True)
class PackStep(Step):
    """Run one forward over a pack of samples, each of its own size, with the packing of the recipe's transformer."""

    packing: Packing
    token_drop: TokenDrop | None = None

    padded: ClassVar[bool] = False
    """Whether samples are padded to the longest of their batch, in place of whole strips."""

    def refusal(self, grid: Grid) -> str | None:
        """Return why the step cannot run a sample of a token grid; positions that are stretched fit any sample."""
        return None if self.packing.base_size is not None else super().refusal(grid)

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """Switch packing off inside a `with` block."""
        with packing_disabled(self.recipe.transformer):
            yield

    def _predict(self, transformer: torch.nn.Module, samples: Samples, seeds: Sequence[Seed] | None) -> Prediction:
        inputs = self.recipe.model_inputs(samples)
        pack = self.packing.pack(
            inputs.latents,
            timesteps=inputs.timesteps,
            references=inputs.references,
            conditioning=inputs.conditioning,
            audio=inputs.audio,
            token_drop=None if seeds is None else self.token_drop,
            seeds=seeds,
            padded=self.padded,
            **samples.text.pack_kwargs(),
        )
        weights, computed = loss_weights(inputs, samples), Computed.of_pack(pack.layout)
        audio: Sequence[torch.Tensor] = ()
        if samples.audio is None:
            output = packed_forward(transformer, pack)
        else:
            output, audio = packed_forward_with_audio(transformer, pack)
        losses = partial(self.objective.packed_losses, output, pack=pack, weights=weights)
        return Prediction(partial(pack.unpack, output), losses, audio, computed)


class OwnSizes(Batching[Plan]):
    """Samples of their own size, rounded up to whole tokens, that attention keeps apart."""

    cached_as: ClassVar[CachedAs] = "pack"
    more_cached_sizes: ClassVar[str] = "of several sizes with --random_resize"
    step_class: ClassVar[type[PackStep]] = PackStep
    batch_name: ClassVar[str]
    """What messages call a batch."""

    def table(self, prepared: PreparedDataset | PreparedStream) -> OpenTable:
        return prepared.open_table

    def columns(self, prepared: PreparedDataset) -> BucketColumns:
        return BucketColumns(prepared.open_table, prepared.spec)

    def fitting(self, rows: SampleRows, plan: Plan) -> SampleRows:
        """Reject the few rows that fit no batch, by the model's positions or, where sizes stay, by its limits.

        Many are left as they are, so that the checks which follow refuse them.
        """
        if self.config.base_size is None:  # stretched positions fit any sample
            rows = _within_positions(rows, batch=self.batch_name)
        limits = self.limits(plan)
        if rows.resize is not None or limits is None or limits.oversize != "error":
            return rows
        text_tokens = rows.counting.text_tokens
        over = exceeding(rows.num_tokens, limits, text_tokens=text_tokens)
        if not are_few(over, rows.num_tokens):
            return rows
        most = strip_tokens(int(rows.num_tokens.max()), limits.strip_length) + text_tokens
        why = f"The largest takes {most:,} tokens, and a {self.batch_name} {limits.max_tokens:,}; raise --max_tokens, "
        why += "or cut videos with --max_frames of hf_bucketing prepare."
        return rows.without(over, batch=self.batch_name, why=why)

    @abstractmethod
    def limits(self, plan: Plan) -> PackPlanConfig | None:
        """Return the limits that one sample can exceed; None if there are none."""

    def frames_that_fit(self, rows: SampleRows, limits: PackPlanConfig) -> list[str]:
        """Return advice on rows whose tokens exceed limits: numbers of frames, with the rows that each keeps."""
        return _frames_that_fit(rows, limits, drop=self.config.token_drop)

    def buckets_of(self, sample: StreamSample, table: Table) -> dict[int, int]:
        ids = table.assign(*np.array(sample.sizes).T).bucket_id.tolist()
        return dict.fromkeys(ids, 1)

    def possible_buckets(self, sample: StreamSample, table: Table) -> Sequence[int]:
        return [*self.buckets_of(sample, table)]

    def collator(self, table: Table, *, resize: RandomResize | None = None, **media: Any) -> PackCollator:
        return PackCollator(cast("OpenTable", table), resize=resize, **media)

    def step(self, recipe: Recipe, **options: Any) -> PackStep:
        batches = self.config
        if batches.token_drop is not None:
            _check_token_drop(recipe)
        packing = enable_packing(
            recipe.transformer,
            backend=batches.attention_backend,
            strip_length=batches.strip_length,
            positions=batches.positions,
            base_size=None if batches.base_size is None else cast("Grid", tuple(batches.base_size)),
        )
        return self.step_class(recipe=recipe, packing=packing, token_drop=batches.token_drop, **options)

    def release(self, transformer: torch.nn.Module) -> None:
        disable_packing(transformer)


def _within_positions(rows: SampleRows, *, batch: str) -> SampleRows:
    """Reject the few rows of a token grid that the model cannot take; many are left as they are."""
    refuse = rows.counting.refuse
    if refuse is None:
        return rows
    prepared, usable = rows.prepared, rows.num_tokens > 0
    ids = column_array(prepared.dataset, "bucket_id").astype(np.int64)
    beyond = beyond_positions(ids, prepared.open_table, refuse) & usable
    if not are_few(beyond, rows.num_tokens):
        return rows
    first = prepared.open_table.size(int(ids[beyond.argmax()]))
    why = f"{refuse(prepared.spec.grid(first))} Make the files smaller, or train in buckets."
    return rows.without(beyond, batch=batch, why=why)


def _check_token_drop(recipe: Recipe) -> None:
    """Raise BucketingError if the model needs all tokens of a sample."""
    family, transformer = recipe.family, recipe.transformer
    try:
        family.check_grid(transformer, family.trial_grids(transformer)[0], kept=torch.tensor([0]))
    except PackingError as error:
        raise BucketingError(f"Omit `token_drop_rate`: {error}") from error


def _frames_that_fit(rows: SampleRows, packs: PackPlanConfig, *, drop: TokenDrop | None) -> list[str]:
    """Return advice on rows whose tokens exceed `max_tokens`: numbers of frames, with the rows that each keeps."""
    prepared, text_tokens = rows.prepared, rows.counting.text_tokens
    sides = np.stack([column_array(prepared.dataset, name) for name in ("num_frames", "height", "width")])
    limits = replace(packs, oversize="own_batch")
    sizes, of_row = np.unique(sides, axis=1, return_inverse=True)
    spec = prepared.spec

    def fitting(max_frames: int) -> int:
        table = replace(prepared.open_table, max_frames=max_frames)
        ids = table.assign(*sizes).bucket_id.astype(np.int64)
        sample_tokens = counted_tokens(ids, table.num_tokens(ids, spec=spec), table=table, spec=spec, drop=drop)
        of_rows = of_row.ravel()
        tokens = tokens_with(rows.conditions, sample_tokens[of_rows], ids[of_rows], table=table, spec=spec)
        _, over = sample_spans(tokens, limits, text_tokens=text_tokens)
        return int(np.count_nonzero((tokens > 0) & ~over))

    longest = int(prepared.open_table.cut(sides[0]).max())
    valid = sorted({spec.snap(Size(frames, 1, 1)).frames for frames in range(1, longest + 1)}, reverse=True)
    most_frames: dict[int, int] = {}
    for frames in valid:
        most_frames.setdefault(fitting(frames), frames)
    most_frames.pop(fitting(longest))  # as many rows as now
    if not most_frames:
        return ["use smaller files", "train in buckets, which crop them (--batching bucket)"]
    fewest, most = min(most_frames), max(most_frames)
    options = [f"--max_frames {most_frames[count]} (keeps {count:,} rows)" for count in dict.fromkeys((fewest, most))]
    return [
        f"prepare again with {' or '.join(options)}",
        f"with --clips all --clip_frames {most_frames[most]} beside it, which makes several samples of a long video",
    ]


class Packs(OwnSizes[PackPlanConfig]):
    """Packs: one sequence of samples of their own sizes, each in whole strips."""

    size_title: ClassVar[str] = "size in packs"
    batch_name: ClassVar[str] = "pack"

    def plan(self, order: EpochConfig, *, cost_model: CostModel, accumulation_steps: int) -> PackPlanConfig:
        batches = self.config
        return PackPlanConfig(
            **vars(batches.pack_limits),
            strategy=batches.pack_strategy,
            balance=batches.balance,
            cost_model=cost_model if batches.balance == "cost" else None,
            accumulation_steps=accumulation_steps,
            oversize="own_batch" if order.evaluation else "error",  # without gradients, it takes less memory
            **vars(order),
        )

    def limits(self, plan: PackPlanConfig) -> PackPlanConfig:
        return plan

    def sampler(self, rows: SampleRows, plan: PackPlanConfig, **options: Any) -> PackBatchSampler:
        try:
            return PackBatchSampler(
                rows.tokens_to_plan,
                config=plan,
                text_tokens=rows.counting.text_tokens,
                rejection=rows.prepared.dataset["rejection"],
                **options,
            )
        except OversizeError as error:
            advice = self.frames_that_fit(rows, plan)
            raise with_file(error, rows.prepared, advice=advice) from error

    def grouping(
        self,
        prepared: PreparedDataset | PreparedStream,
        *,
        text_tokens: int,
        conditions: ConditionRules,
    ) -> PackGrouping:
        return PackGrouping(**vars(self.config.pack_limits), text_tokens=text_tokens)

    def largest_batch(self, grouping: Grouping, bucket: int, *, tokens: int, condition_tokens: int) -> int:
        assert isinstance(grouping, PackGrouping), "it is that of this way"
        span = strip_tokens(tokens + condition_tokens, grouping.strip_length) + grouping.text_tokens
        return max(1, grouping.max_tokens // span)


_NO_STREAMS = (
    '`batching="length"` plans batches by the lengths of all rows, and those of a stream are not known before they '
    'come. Omit `streaming`, or train packs (`batching="pack"`), which take rows as they come.'
)


class LengthStep(PackStep):
    """Run one forward over samples of different lengths, padded to the longest.

    Few of diffusers' transformers take a mask of latent tokens, and nearly all give the rows of a batch the positions
    of one grid. The rows are therefore strips of the packing engine, one for each sample: attention leaves their
    padding out, and each sample has the positions that it has alone. Models that look up positions by the columns of a
    row, such as Wan's 1,024, get as few rows of equal length for each sample as they allow, with less padding.
    """

    padded = True


class Lengths(OwnSizes[LengthPlanConfig]):
    """Batches of samples of like length, or of any, padded to the longest."""

    size_title: ClassVar[str] = "size in padded batches"
    batch_name: ClassVar[str] = "batch"
    step_class: ClassVar[type[PackStep]] = LengthStep

    def plan(self, order: EpochConfig, *, cost_model: CostModel, accumulation_steps: int) -> LengthPlanConfig:
        batches = self.config
        return LengthPlanConfig(
            batch_size=batches.train_batch_size if batches.max_tokens is None else None,
            max_tokens=batches.token_limit,
            strategy=batches.length_strategy,
            num_buckets=batches.length_buckets,
            oversize="own_batch" if order.evaluation else "error",
            **vars(order),
        )

    def limits(self, plan: LengthPlanConfig) -> PackPlanConfig | None:
        if plan.max_tokens is None:
            return None
        return PackPlanConfig(max_tokens=int(plan.max_tokens), strip_length=1, oversize=plan.oversize)

    def sampler(self, rows: SampleRows, plan: LengthPlanConfig, **options: Any) -> LengthBatchSampler:
        if rows.resize is not None:
            raise BucketingError(
                "The cached views of a sample have several sizes, and batches of like length are planned by one for "
                'each row. Give `cached_views="all"` or "first", or train packs (`batching="pack"`).'
            )
        limits, text_tokens = self.limits(plan), rows.counting.text_tokens
        if limits is not None:
            try:
                sample_spans(rows.num_tokens, limits, text_tokens=text_tokens)
            except OversizeError as error:
                raise with_file(error, rows.prepared, advice=self.frames_that_fit(rows, limits)) from error
        lengths = np.where(rows.num_tokens > 0, rows.num_tokens + text_tokens, 0)
        sampler = LengthBatchSampler(lengths, config=plan, **options)
        rejection = rows.prepared.dataset["rejection"]
        warn_of_rejected(lengths, lengths > 0, rejection=rejection, process_index=sampler.process_index)
        return sampler

    def computed_lengths(self, lengths: IntArray, offsets: IntArray) -> IntArray:
        return np.repeat(np.maximum.reduceat(lengths, offsets[:-1]), np.diff(offsets))

    def check_stream(self) -> None:
        raise BucketingError(_NO_STREAMS)

    def grouping(
        self,
        prepared: PreparedDataset | PreparedStream,
        *,
        text_tokens: int,
        conditions: ConditionRules,
    ) -> Grouping:
        raise BucketingError(_NO_STREAMS)

    def largest_batch(self, grouping: Grouping, bucket: int, *, tokens: int, condition_tokens: int) -> int:
        raise BucketingError(_NO_STREAMS)
