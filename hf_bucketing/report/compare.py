"""Padding, bucketing and packing compared on real plans of one data set, and ladders compared on a mix of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray, IntArray
from ..buckets.assignment import REJECTED_BUCKET, AssignmentRule, count_rejections, has_bucket
from ..buckets.ladders import COMMON_RATIOS
from ..buckets.open_table import open_table
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..conditions.rows import RowConditions
from ..plans.epoch import EpochPlan
from ..plans.packs import PackPlanConfig, plan_packs, strip_tokens
from ..randomness import Purpose, generator
from .measure import (
    AssignedColumns,
    BucketReport,
    ReportConfig,
    SizeColumns,
    Sizes,
    Subject,
    Targets,
    bucket_targets,
    empty_plan,
    kept_pixels,
    mean,
    measure_buckets,
    plan_batches,
    plan_bucketing,
    read_subject,
)
from .references import AppendedReport, ReferenceReport, measure_appended, measure_references
from .rejections import RejectedRows, explain_rejections
from .samples import (
    Histogram,
    SampleCrop,
    aspect_histogram,
    duration_histogram,
    random_samples,
    size_histogram,
    token_histogram,
    worst_crops,
)

StrategyName = Literal["padding", "bucketing", "packing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyReport:
    """One strategy, measured on the plan of one epoch; means of nothing are NaN.

    Attributes:
        name (`"padding"`, `"bucketing"` or `"packing"`): See [`compare_strategies`].
        kept (`int`): Samples in the plan: rows, each as often as it occurs.
        dropped (mapping of `str` to `int`): Samples of the epoch that are not in the plan, by the label of their
            [`Rejection`][hf_bucketing.Rejection], or `remainder` for those that fill no step.
        num_steps (`int`): Steps of the epoch, on each process.
        mixed_steps (`int`): Bucketing: steps whose processes hold several buckets. 0 for the others.
        real_tokens (`int`): Tokens of the kept samples, at the sizes that they are trained at, of their references,
            and of their texts where these sit in the same sequence.
        computed_tokens (`int`): Tokens that the model computes, padding included.
        kept_area (`float`): Mean kept area of all rows that this way can take, each once: that of [`BucketReport`] for
            bucketing.
        kept_frames (`float`): Mean over the same rows of the share of their frames that is kept.
        step_balance (`float`): Mean over the steps of (mean cost over processes ÷ largest cost over processes);
            1 if no process ever waits for another.
        epoch_cost (`float`): Sum over the steps of the largest cost over processes, in floating-point operations of
            one transformer block's forward pass or in measured seconds: what the clock shows.
        efficiency (`float`): Cost of the kept samples, each alone and without padding, ÷ (`epoch_cost` · processes):
            the share of all processes' time that is neither spent on padding nor on waiting, at any resolution.
        max_tokens (`int`, *optional*): Packing: tokens per process and step. None for the others.
        token_use (`float`): Real tokens ÷ computed tokens.
        tokens_per_sample (`float`): Mean tokens of a kept sample, without padding.
        plan_bytes (`int`): Bytes of the arrays of the epoch's plan, which each process holds.
        kept_pixels (`float`): Pixels of the files that the kept samples are trained on.
    """

    name: StrategyName
    kept: int
    dropped: Mapping[str, int]
    num_steps: int
    mixed_steps: int
    real_tokens: int
    computed_tokens: int
    kept_area: float
    kept_frames: float
    step_balance: float
    epoch_cost: float
    efficiency: float
    max_tokens: int | None = None
    token_use: float
    tokens_per_sample: float
    plan_bytes: int
    kept_pixels: float

    @property
    def num_dropped(self) -> int:
        """Samples that are not in the plan."""
        return sum(self.dropped.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything reported about a data set and a bucket table; text and figures are made from it alone.

    Attributes:
        config ([`ReportConfig`]): Settings of the plans.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
        buckets ([`BucketReport`]): What the table does to the data.
        strategies (`tuple[StrategyReport, ...]`): Padding, bucketing and packing compared.
        aspects ([`Histogram`]): Samples by aspect ratio.
        tokens ([`Histogram`]): Samples by tokens.
        sizes ([`Histogram`]): Samples by the square root of their frame's area, in pixels.
        durations ([`Histogram`], *optional*): Videos by seconds; None if no frame rate is known.
        rejected (`tuple` of [`RejectedRows`]): Rejected rows by reason, with examples.
        worst_crops (`tuple` of [`SampleCrop`]): Samples that lose most of their frame, the worst buckets first.
        random_samples (`tuple` of [`SampleCrop`]): Some of the samples that have a bucket.
        references ([`ReferenceReport`], *optional*): What references cost in buckets; None if there are none.
        appended ([`AppendedReport`], *optional*): What appended frames cost in buckets; None if none are.
        condition_shares (mapping of `str` to `float`): Share of all tokens in buckets that those of each condition
            are, by its name.
    """

    config: ReportConfig
    spec: LatentSpec
    buckets: BucketReport
    strategies: tuple[StrategyReport, ...]
    aspects: Histogram
    tokens: Histogram
    sizes: Histogram
    durations: Histogram | None
    rejected: tuple[RejectedRows, ...]
    worst_crops: tuple[SampleCrop, ...]
    random_samples: tuple[SampleCrop, ...]
    references: ReferenceReport | None = None
    appended: AppendedReport | None = None
    condition_shares: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, NaN as None."""
        return {"version": 3, **_as_json(self)}


def _as_json(value: Any) -> Any:
    """Turn dataclasses and mappings into dicts, sequences into lists (named tuples into dicts) and NaN into None."""
    if is_dataclass(value):
        return {field.name: _as_json(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return _as_json(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): _as_json(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_as_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_report(
    columns: SizeColumns,
    table: BucketTable,
    *,
    spec: LatentSpec,
    config: ReportConfig | None = None,
    assigned: AssignedColumns | None = None,
    max_frames: int | None = None,
    conditions: RowConditions | None = None,
    weights: npt.ArrayLike | None = None,
) -> Report:
    """Report what a bucket table does to a data set, and how padding, bucketing and packing compare on it.

    Args:
        columns ([`SizeColumns`]): Sizes of all rows.
        table ([`BucketTable`][hf_bucketing.BucketTable]): The buckets.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model, which turn pixels into tokens.
        config ([`ReportConfig`], *optional*): Settings of the plans.
        assigned ([`AssignedColumns`], *optional*): Buckets that the rows have; by default they are assigned anew, by
            `config.rule`.
        max_frames (`int`, *optional*): Most frames of a sample in padding and packing, those of the
            [`OpenTable`][hf_bucketing.OpenTable] that packs are trained with; by default a sample keeps all.
        conditions ([`RowConditions`][hf_bucketing.conditions.rows.RowConditions], *optional*): Conditions of the rows,
            with the frames that a run appends.
        weights (array of `float`, shape `(n,)`, *optional*): Occurrences of each row per epoch, as training takes them
            of a prepared data set's `weights`; by default once. All plans and what is counted of them have them.

    Raises:
        BucketingError: If there is no row, or a bucket does not divide into whole tokens.
        PlanError: If a sample exceeds `config.max_tokens`.
    """
    config = config or ReportConfig()
    subject = read_subject(
        columns,
        table,
        spec=spec,
        config=config,
        assigned=assigned,
        max_frames=max_frames,
        conditions=conditions,
        weights=weights,
    )
    conditions = conditions or RowConditions(num_rows=len(subject.times))
    return Report(
        config=config,
        spec=spec,
        buckets=measure_buckets(subject),
        strategies=compare_strategies(subject),
        aspects=aspect_histogram(subject),
        tokens=token_histogram(subject),
        sizes=size_histogram(subject),
        durations=duration_histogram(subject, columns.fps),
        rejected=explain_rejections(
            subject.sizes, subject.bucketed.rejection, table=table, rule=config.rule, spec=spec
        ),
        worst_crops=worst_crops(subject),
        random_samples=random_samples(subject),
        references=measure_references(
            subject.bucketed.bucket_id.astype(np.int64),
            conditions,
            table=table,
            spec=spec,
            config=config,
            weights=subject.weights,
        ),
        appended=measure_appended(subject.bucketed, conditions.appended, spec=spec),
        condition_shares=_condition_shares(subject, conditions),
    )


def _condition_shares(subject: Subject, conditions: RowConditions) -> dict[str, float]:
    """Return the share of all tokens in buckets that those of each condition are."""
    total = max(1, int(subject.bucketed.all_tokens.sum()))
    shares = conditions.shares(subject.bucketed.assigned_sizes, spec=subject.spec)
    return {name: tokens / total for name, tokens in shares.items()}


def compare_strategies(subject: Subject) -> tuple[StrategyReport, ...]:
    """Measure padding, bucketing and packing, in this order, on one data set.

    A sample's own size is rounded up to whole tokens, its frames down to a number that the model takes.
    """
    return tuple(_measure(make(subject), subject) for make in (_padding, _bucketing, _packing))


class _Epoch(NamedTuple):
    """One epoch of a strategy: tokens that are computed, in any grouping, and the cost of each batch."""

    name: StrategyName
    targets: Targets
    plan: EpochPlan
    computed: IntArray
    costs: FloatArray
    max_tokens: int | None = None


def _padding(subject: Subject) -> _Epoch:
    """Plan `batch_size` samples at their own sizes, drawn at random.

    Every batch is padded to the largest number of frames, the largest height and the largest width that it holds, and
    references to the most tokens that those of one sample take. Every token attends to the whole padded sample.
    """
    targets, config = subject.packed, subject.config
    one_bucket = np.where(has_bucket(targets.bucket_id), 0, REJECTED_BUCKET)
    plan = plan_batches(one_bucket, config, weights=subject.weights)
    largest = (np.maximum.reduceat(side[plan.indices], plan.offsets[:-1]) for side in targets.sizes)
    table = open_table(subject.spec)
    padded = table.num_tokens(table.assign(*largest).bucket_id, spec=subject.spec) + config.text_tokens
    padded = padded + np.maximum.reduceat(targets.condition_tokens[plan.indices], plan.offsets[:-1])
    counts = np.diff(plan.offsets)
    return _Epoch("padding", targets, plan, padded * counts, config.costs.cost(padded) * counts)


def _bucketing(subject: Subject) -> _Epoch:
    """Plan `batch_size` samples of one bucket and of references of equal sizes, at the bucket's size."""
    targets, config = subject.bucketed, subject.config
    plan = plan_bucketing(subject)
    tokens = targets.all_tokens[plan.indices] + config.text_tokens
    return _Epoch("bucketing", targets, plan, tokens, config.costs.pack_cost(tokens, plan.offsets))


def _packing(subject: Subject) -> _Epoch:
    """Plan packs of at most `max_tokens` tokens, of samples at their own sizes and their references.

    Each sample takes whole strips, which are what is computed, and attends to its own strips.
    """
    targets, config = subject.packed, subject.config
    max_tokens = config.max_tokens or _default_max_tokens(targets, config)
    lengths = targets.all_tokens
    available = int(subject.times[lengths > 0].sum())
    if available < config.num_processes:
        plan = empty_plan(available, config)
    else:
        packs = PackPlanConfig(max_tokens=max_tokens, strip_length=config.strip_length, seed=config.seed)
        plan = plan_packs(
            lengths,
            packs,
            epoch=0,
            num_processes=config.num_processes,
            text_tokens=config.text_tokens,
            weights=subject.weights,
        )
    tokens = strip_tokens(lengths[plan.indices], config.strip_length) + config.text_tokens
    return _Epoch("packing", targets, plan, tokens, config.costs.pack_cost(tokens, plan.offsets), max_tokens)


def _default_max_tokens(targets: Targets, config: ReportConfig) -> int:
    """Return `batch_size` samples of median tokens, or the largest sample in whole strips if that is more."""
    tokens = targets.all_tokens[targets.num_tokens > 0]
    if not len(tokens):
        return 0
    largest = int(strip_tokens(tokens, config.strip_length).max())
    return max(int(np.median(tokens) + config.text_tokens) * config.batch_size, largest + config.text_tokens)


def _measure(epoch: _Epoch, subject: Subject) -> StrategyReport:
    targets, plan, rows = epoch.targets, epoch.plan, epoch.plan.indices
    by_step = epoch.costs.reshape(plan.num_steps, plan.num_processes)
    slowest = by_step.max(axis=1)
    remainder = {reason: count for reason, count in plan.drop_reasons.items() if reason == "remainder"}
    lengths = targets.all_tokens[rows] + subject.config.text_tokens
    useful = float(subject.config.costs.cost(lengths).sum())
    real, computed = int(lengths.sum()), int(epoch.computed.sum())
    return StrategyReport(
        name=epoch.name,
        kept=len(rows),
        dropped={**count_rejections(targets.rejection, times=subject.times), **remainder},
        num_steps=plan.num_steps,
        mixed_steps=plan.num_mixed_steps if epoch.name == "bucketing" else 0,
        real_tokens=real,
        computed_tokens=computed,
        kept_area=targets.mean_of_rows("kept_area"),
        kept_frames=targets.mean_of_rows("kept_frames"),
        step_balance=mean(by_step.mean(axis=1) / slowest),
        epoch_cost=float(slowest.sum()),
        efficiency=useful / float(slowest.sum() * plan.num_processes) if plan.num_steps else math.nan,
        max_tokens=epoch.max_tokens,
        token_use=real / computed if computed else math.nan,
        tokens_per_sample=real / len(rows) if len(rows) else math.nan,
        plan_bytes=sum(array.nbytes for array in (plan.indices, plan.offsets, plan.bucket_ids)),
        kept_pixels=float(kept_pixels(subject.sizes, targets)[rows].sum()),
    )


_SWEEP = 2001  # aspect ratios among which the worst is searched
_LARGE = 20_000  # pixels of a side that every bucket can be cut from


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderReport:
    """What a ladder makes of samples; kept areas are shares of a frame.

    Attributes:
        num_buckets (`int`): Buckets of its table.
        common (`float`): Mean kept area over the common ratios within the limit, and all numbers of frames.
        worst (`float`): Smallest kept area over all ratios within the limit, and all numbers of frames, of samples
            that are larger than every bucket.
        mix (`float`): Mean kept area over the mix of [`measure_ladder`], of the samples that have a bucket.
        too_small (`float`): Share of the mix that every bucket would enlarge.
        short_batches (`float`): Share of the batches of an epoch of the mix that are not full.
    """

    num_buckets: int
    common: float
    worst: float
    mix: float
    too_small: float
    short_batches: float


def measure_ladder(
    table: BucketTable,
    spec: LatentSpec,
    *,
    max_aspect_ratio: float = 2.5,
    num_samples: int = 100_000,
    seed: int = 0,
) -> LadderReport:
    """Measure a table on the common ratios, on all ratios, and on a mix, all of them up to `max_aspect_ratio`.

    The mix is log-normal: aspect ratios around 1.2 with a standard deviation of 0.35 in ln, sides (square root of the
    area) around 1,000 pixels with 0.4; ratios beyond the limit are omitted. Frames are those of the table and up to
    15 more, evenly. An epoch takes batches of 8 samples on 8 processes.

    Raises:
        BucketingError: If a bucket does not divide into whole tokens.
    """
    limit, frames = math.log(max_aspect_ratio), sorted({size.frames for size in table.sizes})
    config = ReportConfig(batch_size=8, num_processes=8, seed=seed)
    common = [math.log(ratio) for ratio in COMMON_RATIOS if ratio <= max_aspect_ratio * (1 + 1e-9)]

    def kept_of_large(logarithms: FloatArray) -> FloatArray:
        counts = np.repeat(np.array(frames), len(logarithms))
        sizes = _sizes_of(counts, np.tile(logarithms, len(frames)), np.full(len(counts), _LARGE))
        return bucket_targets(sizes, table, spec=spec, rule=config.rule).kept_area

    mix = ladder_mix(frames, limit, num_samples=num_samples, seed=seed)
    targets = bucket_targets(mix, table, spec=spec, rule=config.rule)
    plan = plan_batches(targets.bucket_id.astype(np.int64), config)
    in_bucket = has_bucket(targets.bucket_id)
    return LadderReport(
        num_buckets=len(table),
        common=float(kept_of_large(np.array([*common, *(-ratio for ratio in common)])).mean()),
        worst=float(kept_of_large(np.linspace(-limit, limit, _SWEEP)).min()),
        mix=mean(targets.kept_area[in_bucket]),
        too_small=1 - float(in_bucket.mean()),
        short_batches=mean(np.diff(plan.offsets) < config.batch_size),
    )


def count_kept(
    table: BucketTable, rules: Sequence[AssignmentRule], *, num_samples: int = 100_000, seed: int = 0
) -> list[int]:
    """Return how many images of the mix of [`measure_ladder`], of all aspect ratios, each rule gives a bucket."""
    mix = ladder_mix([1], math.inf, num_samples=num_samples, seed=seed)
    return [int(has_bucket(table.assign(*mix, rule=rule).bucket_id).sum()) for rule in rules]


def ladder_mix(frames: Sequence[int], limit: float, *, num_samples: int, seed: int = 0) -> Sizes:
    """Return the sizes of the mix of [`measure_ladder`], with aspect ratios up to a limit of their logarithms."""
    rng = generator(Purpose.LADDER_MIX, seed)
    shapes = rng.normal(math.log(1.2), 0.35, 2 * num_samples + 100)
    shapes = shapes[np.abs(shapes) <= limit][:num_samples]
    counts = rng.choice(np.array(frames), len(shapes))
    counts += np.where(counts > 1, rng.integers(0, 16, len(shapes)), 0)
    return _sizes_of(counts, shapes, rng.lognormal(math.log(1000), 0.4, len(shapes)))


def _sizes_of(frames: IntArray, logarithms: FloatArray, sides: FloatArray) -> Sizes:
    """Return sizes of given aspect ratios, as logarithms, and square roots of their areas."""
    heights, widths = (
        np.maximum(np.round(sides * np.exp(sign * logarithms / 2)).astype(np.int64), 1) for sign in (-1, 1)
    )
    return Sizes(np.asarray(frames, np.int64), heights, widths)
