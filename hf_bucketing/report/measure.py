"""What a bucket table makes of the samples of a data set: sizes, losses, batches and histograms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray, IntArray
from ..buckets.assignment import AssignmentRule, as_columns, count_rejections, has_bucket
from ..buckets.cost import CostModel
from ..buckets.kept import kept_area
from ..buckets.open_table import open_table
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..conditions.rows import BucketParts, RowConditions, bucket_parts
from ..errors import BucketingError
from ..plans.buckets import BucketPlanConfig, plan_buckets
from ..plans.epoch import EpochPlan
from ..plans.packs import PackPlanConfig
from ..plans.rows import epoch_occurrences
from ..settings import check_at_least, not_default


class SizeColumns(NamedTuple):
    """Sizes of all samples, as columns of one length.

    Args:
        frames (array of `int`, shape `(n,)`): Frames at the frame rate of training; 1 for an image, negative if the
            sample is unreadable.
        heights (array of `int`, shape `(n,)`): Heights in pixels.
        widths (array of `int`, shape `(n,)`): Widths in pixels.
        fps (array of `float`, shape `(n,)`, *optional*): Frame rates of training, 0 for images; they give durations.
    """

    frames: npt.ArrayLike
    heights: npt.ArrayLike
    widths: npt.ArrayLike
    fps: npt.ArrayLike | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Settings of the plans that a report makes.

    Args:
        batch_size (`int`): Samples per process and step, for bucketing and padding.
        num_processes (`int`): Processes that share the steps.
        max_tokens (`int`, *optional*): Tokens per process and step, for packing. Defaults to `batch_size` samples of
            median tokens, or the largest sample where that is more.
        strip_length (`int`): Tokens per strip of a pack; each sample takes whole strips.
        text_tokens (`int`): Tokens of each caption, for models whose text sits in one sequence with its sample; they
            count for `max_tokens` and cost as the sample's own.
        rule ([`AssignmentRule`][hf_bucketing.AssignmentRule]): Limits of assigning a sample to a bucket.
        max_area (`int`, `"table"` or `"none"`): Largest frame, in pixels, at which padding and packing take a sample;
            a larger one is shrunk to it. `"table"`: that of the table's largest bucket of as many frames (of the
            nearest smaller number that the table has), so that all three train at about the same size. `"none"`:
            every sample at its own size.
        width (`int`): Hidden size of the model, for the cost of tokens; the default is that of Wan 2.1 1.3B.
        cost_model ([`CostModel`][hf_bucketing.CostModel], *optional*): Cost of tokens in seconds, as a training
            run measured it; by default floating-point operations of a model of that width.
        seed (`int`): Seed of the plans, at least 0.

    Raises:
        BucketingError: If a value is out of range.
    """

    batch_size: int = 4
    num_processes: int = 8
    max_tokens: int | None = None
    strip_length: int = PackPlanConfig.strip_length
    text_tokens: int = 0
    rule: AssignmentRule = field(default_factory=AssignmentRule)
    max_area: int | Literal["table", "none"] = "table"
    width: int = 1536
    cost_model: CostModel | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, self, "batch_size", "num_processes", "max_tokens", "strip_length", "width")
        check_at_least(0, self, "text_tokens", "seed")
        if self.max_area not in ("table", "none") and not (isinstance(self.max_area, int) and self.max_area >= 1):
            raise BucketingError(
                f'`max_area` must be a number of pixels of at least 1, "table" or "none", got {self.max_area!r}.'
            )
        if self.cost_model is not None and not_default(self, "width"):
            raise BucketingError("Omit `width`: it decides the cost of tokens, and `cost_model` gives that.")

    @property
    def processes(self) -> str:
        """Number of processes, in words."""
        return "1 process" if self.num_processes == 1 else f"{self.num_processes} processes"

    @property
    def costs(self) -> CostModel:
        """Cost in seconds as measured, or in floating-point operations of one transformer block of this width."""
        return CostModel.for_transformer(self.width) if self.cost_model is None else self.cost_model

    @property
    def units(self) -> CostUnits:
        """Units in which costs are printed."""
        if self.cost_model is None:
            return CostUnits("GFLOP", 1e-9, "TFLOP per block", 1e-12, "one block, forward")
        return CostUnits("ms", 1e3, "seconds", 1.0, "of a training step, as measured")


class CostUnits(NamedTuple):
    """Units of the cost of a sample and of an epoch, their factors, and what the cost counts."""

    sample: str
    sample_factor: float
    epoch: str
    epoch_factor: float
    counts: str


class Sizes(NamedTuple):
    """Sizes of all samples as `int64` arrays of shape `(n,)`, in frames and pixels."""

    frames: IntArray
    heights: IntArray
    widths: IntArray

    def select(self, rows: IntArray) -> Sizes:
        """Return the sizes of some samples."""
        return Sizes(*(column[rows] for column in self))


class Targets(NamedTuple):
    """Target of each sample; every array has shape `(n,)`.

    Attributes:
        bucket_id: Position in the table that the targets come from, negative for a rejected sample.
        rejection: A [`Rejection`][hf_bucketing.Rejection] or its label.
        num_tokens: Tokens at the target size, 0 for a rejected sample.
        sizes: Target sizes; those of rejected samples, and the three arrays below, mean nothing.
        kept_area: Share of the sample's frame in its target, by [`kept_area`][hf_bucketing.buckets.kept.kept_area].
        kept_frames: Share of the sample's frames that its target has.
        scale: Factor by which cover-resize scales the sample's sides; above 1 it enlarges.
        condition_tokens: Tokens of the sample's conditions, 0 for a rejected sample.
    """

    bucket_id: npt.NDArray[np.int32]
    rejection: npt.NDArray[Any]
    num_tokens: IntArray
    sizes: Sizes
    kept_area: FloatArray
    kept_frames: FloatArray
    scale: FloatArray
    condition_tokens: IntArray

    @property
    def all_tokens(self) -> IntArray:
        """Tokens of each sample and of its conditions."""
        return self.num_tokens + self.condition_tokens

    @property
    def assigned_sizes(self) -> IntArray:
        """Frames, height and width of each target, `(n, 3)`; 0 for rejected samples."""
        return np.where(has_bucket(self.bucket_id)[:, None], np.stack(self.sizes, 1), 0)

    def mean_of_rows(self, name: Literal["kept_area", "kept_frames"]) -> float:
        """Return the mean of an attribute over all samples that have a target, each once; NaN if none has one."""
        return mean(getattr(self, name)[has_bucket(self.bucket_id)])

    def showing(self, conditions: RowConditions, *, spec: LatentSpec) -> Targets:
        """Return these targets with the tokens of conditions."""
        return self._replace(condition_tokens=conditions.num_tokens(self.assigned_sizes, spec=spec))


def kept_pixels(sizes: Sizes, targets: Targets) -> FloatArray:
    """Return the pixels that each sample is trained on, `(n,)`; those that are enlarged count as they are in the file.

    Unreadable samples have none; those of rejected ones mean nothing.
    """
    usable = np.minimum.reduce(sizes) > 0
    pixels, target = (np.prod([side.astype(np.float64) for side in of], axis=0) for of in (sizes, targets.sizes))
    seen = pixels * usable * targets.kept_area * np.minimum(targets.kept_frames, 1)
    kept: FloatArray = np.minimum(target, seen)
    return kept


class Subject(NamedTuple):
    """Everything that a report is computed from: the samples in their buckets and at their own size, and settings.

    `parts` are buckets divided by the sizes of conditions, if samples have some. `weights`
    are the occurrences of each row per epoch, None for once each, and `times` those in the first epoch, which is
    planned.
    """

    sizes: Sizes
    bucketed: Targets
    packed: Targets
    table: BucketTable
    spec: LatentSpec
    config: ReportConfig
    times: IntArray
    parts: BucketParts | None = None
    weights: FloatArray | None = None


class AssignedColumns(NamedTuple):
    """Buckets that rows have already.

    Attributes:
        bucket_id (array of `int`, shape `(n,)`): Position in the table, negative for a rejected row.
        rejection (array of `str`, shape `(n,)`): Labels of [`Rejection`][hf_bucketing.Rejection].
    """

    bucket_id: npt.NDArray[Any]
    rejection: npt.NDArray[Any]


class CutSamples(NamedTuple):
    """Samples of which buckets keep less than half of the frames.

    Attributes:
        samples: Number of these samples.
        row: The sample that keeps the smallest share.
        kept: Frames that it keeps.
        frames: Frames that it has.
    """

    samples: int
    row: int
    kept: int
    frames: int


def samples_cut_short(sizes: Sizes, targets: Targets) -> CutSamples | None:
    """Return which samples lose more than half of their frames to their buckets; None if none does."""
    rows = np.flatnonzero(has_bucket(targets.bucket_id) & (targets.kept_frames < 0.5))
    if not len(rows):
        return None
    row = int(rows[targets.kept_frames[rows].argmin()])
    return CutSamples(len(rows), row, int(targets.sizes.frames[row]), int(sizes.frames[row]))


def read_subject(
    columns: SizeColumns,
    table: BucketTable,
    *,
    spec: LatentSpec,
    config: ReportConfig,
    assigned: AssignedColumns | None = None,
    max_frames: int | None = None,
    conditions: RowConditions | None = None,
    weights: npt.ArrayLike | None = None,
) -> Subject:
    """Read the columns and find the targets of all samples; raises what `make_report` raises."""
    sizes = read_sizes(columns)
    if assigned is None:
        bucketed = bucket_targets(sizes, table, spec=spec, rule=config.rule)
    else:
        bucketed = assigned_targets(
            sizes, assigned.bucket_id.astype(np.int32), assigned.rejection, table=table, spec=spec
        )
    packed = packed_targets(
        sizes, spec=spec, max_area=_area_limits(sizes.frames, table, config), max_frames=max_frames
    )
    parts = None
    if conditions:
        parts = bucket_parts(bucketed.bucket_id, conditions, table=table, spec=spec)
        bucketed, packed = (targets.showing(conditions, spec=spec) for targets in (bucketed, packed))
    times = epoch_occurrences(weights, num_rows=len(sizes.frames), seed=config.seed)
    by_row = None if weights is None else np.asarray(weights, np.float64)
    return Subject(sizes, bucketed, packed, table, spec, config, times, parts, by_row)


def read_sizes(columns: SizeColumns) -> Sizes:
    """Return the columns as arrays, or raise if they are empty or differ in length."""
    sizes = Sizes(*as_columns(*columns[:3]))
    if not len(sizes.frames):
        raise BucketingError("The data set is empty: there is nothing to report about.")
    return sizes


def bucket_targets(sizes: Sizes, table: BucketTable, *, spec: LatentSpec, rule: AssignmentRule) -> Targets:
    """Assign each sample to its bucket."""
    result = table.assign(*sizes, rule=rule)
    return assigned_targets(sizes, result.bucket_id, result.rejection, table=table, spec=spec)


def assigned_targets(
    sizes: Sizes,
    bucket_id: npt.NDArray[np.int32],
    rejection: npt.NDArray[Any],
    *,
    table: BucketTable,
    spec: LatentSpec,
) -> Targets:
    """Return the targets of samples that are already assigned to buckets."""
    targets = Sizes(*np.array(table.sizes, np.int64)[np.maximum(bucket_id, 0)].T)
    return _targets(bucket_id, rejection, table.num_tokens(bucket_id, spec=spec), sizes, targets)


def largest_areas(buckets: Iterable[Size]) -> dict[int, int]:
    """Return the pixels of the largest bucket of each number of frames, in rising order of frames."""
    areas: dict[int, int] = {}
    for frames, height, width in sorted(buckets):
        areas[frames] = max(areas.get(frames, 0), height * width)
    return areas


def _area_limits(frames: IntArray, table: BucketTable, config: ReportConfig) -> IntArray | int | None:
    """Return the largest frame, in pixels, of each sample outside of buckets; None if there is no limit."""
    if not isinstance(config.max_area, str):
        return config.max_area
    if config.max_area == "none":
        return None
    areas = largest_areas(table.sizes)
    positions = np.searchsorted(np.array([*areas]), frames, side="right") - 1
    return np.array([*areas.values()])[np.maximum(positions, 0)]


def packed_targets(
    sizes: Sizes, *, spec: LatentSpec, max_area: IntArray | int | None, max_frames: int | None = None
) -> Targets:
    """Give each sample its own size in whole tokens, shrunk first where its frame exceeds `max_area` pixels.

    Samples keep at most `max_frames`.
    """
    shrunk = sizes if max_area is None else _shrink(sizes, max_area)
    table = open_table(spec, max_frames=max_frames)
    shrunk = shrunk._replace(frames=table.cut(shrunk.frames))
    result = table.assign(*shrunk)
    usable = has_bucket(result.bucket_id)
    targets = Sizes(*spec.snap_arrays(*(np.where(usable, column, 1) for column in shrunk)))
    num_tokens = table.num_tokens(result.bucket_id, spec=spec)
    return _targets(result.bucket_id, result.rejection, num_tokens, sizes, targets)


def _targets(
    bucket_id: npt.NDArray[np.int32], rejection: npt.NDArray[Any], num_tokens: IntArray, sizes: Sizes, targets: Sizes
) -> Targets:
    frames, heights, widths = (np.maximum(column, 1) for column in sizes)
    area = kept_area(sizes.heights, sizes.widths, target_heights=targets.heights, target_widths=targets.widths)
    return Targets(
        bucket_id=bucket_id,
        rejection=rejection,
        num_tokens=num_tokens,
        sizes=targets,
        kept_area=area,
        kept_frames=targets.frames / frames,
        scale=np.maximum(targets.heights / heights, targets.widths / widths),
        condition_tokens=np.zeros_like(num_tokens),
    )


def _shrink(sizes: Sizes, max_area: IntArray | int) -> Sizes:
    """Shrink frames above `max_area` to it, sides rounded down to pixels: 1000×4000 within 10⁶ -> 500×2000."""
    large = (np.minimum(sizes.heights, sizes.widths) > 0) & (sizes.heights * sizes.widths > max_area)
    scale = np.sqrt(max_area / np.where(large, sizes.heights * sizes.widths, max_area))
    heights, widths = (
        np.where(large, np.maximum((side * scale).astype(np.int64), 1), side) for side in (sizes.heights, sizes.widths)
    )
    return Sizes(sizes.frames, heights, widths)


def plan_batches(bucket_ids: IntArray, config: ReportConfig, *, weights: FloatArray | None = None) -> EpochPlan:
    """Plan an epoch of batches of one bucket; without a sample for each process, the plan has no step."""
    times = epoch_occurrences(weights, num_rows=len(bucket_ids), seed=config.seed)
    available = int(times[has_bucket(bucket_ids)].sum())
    if available < config.num_processes:
        return empty_plan(available, config)
    settings = BucketPlanConfig(batch_size=config.batch_size, seed=config.seed)
    return plan_buckets(bucket_ids, settings, epoch=0, num_processes=config.num_processes, weights=weights)


def plan_bucketing(subject: Subject) -> EpochPlan:
    """Plan an epoch of batches as training does: of one bucket, and of references of equal sizes."""
    ids, parts = subject.bucketed.bucket_id.astype(np.int64), subject.parts
    if parts is None:
        return plan_batches(ids, subject.config, weights=subject.weights)
    plan = plan_batches(parts.ids, subject.config, weights=subject.weights)
    return replace(plan, bucket_ids=parts.buckets_of(plan.bucket_ids))


def empty_plan(available: int, config: ReportConfig) -> EpochPlan:
    """Return a plan without a step, so that a report can say why: too few samples are usable."""
    return EpochPlan.without_steps(config.num_processes, drop_reasons={"remainder": available} if available else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUse:
    """One bucket: its size, what it does to its samples, and its part in one epoch's plan.

    Attributes:
        bucket_id (`int`): Position in the table.
        size ([`Size`][hf_bucketing.Size]): Target size.
        num_tokens (`int`): Tokens per sample, without references.
        cost (`float`): Cost of one sample without references: floating-point operations of one transformer block's
            forward pass, or measured seconds.
        num_samples (`int`): Samples of an epoch that are assigned to it: its rows, each as often as it occurs.
        kept_area (`float`): Mean kept area of its rows, each once, as are the two means below; NaN without rows.
        kept_frames (`float`): Mean share of the rows' frames that the bucket has.
        scale (`float`): Mean factor by which cover-resize scales a side; above 1 it enlarges.
        enlarged (`int`): Samples with a factor above 1.
        batches (`int`): Batches of this bucket on all processes together, short ones included.
        short_batches (`int`): Batches of fewer than `batch_size` samples.
        mixed_samples (`int`): Samples in mixed steps, whose processes hold one sample each, of several buckets.
        dropped (`int`): Samples in no batch of this epoch.
    """

    bucket_id: int
    size: Size
    num_tokens: int
    cost: float
    num_samples: int
    kept_area: float
    kept_frames: float
    scale: float
    enlarged: int
    batches: int
    short_batches: int
    mixed_samples: int
    dropped: int


class Spread(NamedTuple):
    """Mean, median and largest of some values; NaN if there are none."""

    mean: float
    median: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReport:
    """What a bucket table does to a data set.

    Attributes:
        num_samples (`int`): Rows of the data set.
        samples_per_epoch (`int`): Its rows, each as often as it occurs in the epoch that is planned.
        rejected (`int`): Rows without a bucket.
        rejections (mapping of `str` to `int`): Rejected rows, by the label of their
            [`Rejection`][hf_bucketing.Rejection].
        aspect_error ([`Spread`]): |ln(aspect ratio of a sample ÷ aspect ratio of its bucket)|.
        aspect_difference ([`Spread`]): |aspect ratio of a sample − aspect ratio of its bucket|, as NovelAI prints it.
        kept_area (`float`): Mean kept area of all rows with a bucket, each once; NaN if there is none.
        enlarged (`int`): Rows that their bucket enlarges.
        cut_short ([`CutSamples`], *optional*): Samples that lose more than half of their frames; None if none does.
        num_steps (`int`): Steps of an epoch, on each process.
        mixed_steps (`int`): Steps whose processes hold several buckets.
        buckets (`tuple[BucketUse, ...]`): All buckets, in the order of the table.
    """

    num_samples: int
    samples_per_epoch: int
    rejected: int
    rejections: Mapping[str, int]
    aspect_error: Spread
    aspect_difference: Spread
    kept_area: float
    enlarged: int
    cut_short: CutSamples | None
    num_steps: int
    mixed_steps: int
    buckets: tuple[BucketUse, ...]

    @property
    def used(self) -> tuple[BucketUse, ...]:
        """Buckets that hold a sample, the fullest first, equal ones in the order of the table."""
        return tuple(sorted((use for use in self.buckets if use.num_samples), key=lambda use: -use.num_samples))


def measure_buckets(subject: Subject) -> BucketReport:
    """Plan one epoch of buckets and count; the plan has no step if fewer samples than processes have a bucket."""
    sizes, targets = subject.sizes, subject.bucketed
    plan = plan_bucketing(subject)
    rows = np.flatnonzero(has_bucket(targets.bucket_id))
    ratio, target_ratio = (side.widths[rows] / side.heights[rows] for side in (sizes, targets.sizes))
    return BucketReport(
        num_samples=len(targets.bucket_id),
        samples_per_epoch=int(subject.times.sum()),
        rejected=len(targets.bucket_id) - len(rows),
        rejections=count_rejections(targets.rejection),
        aspect_error=_spread(np.abs(np.log(ratio / target_ratio))),
        aspect_difference=_spread(np.abs(ratio - target_ratio)),
        kept_area=targets.mean_of_rows("kept_area"),
        enlarged=int(np.count_nonzero(targets.scale[rows] > 1)),
        cut_short=samples_cut_short(sizes, targets),
        num_steps=plan.num_steps,
        mixed_steps=plan.num_mixed_steps,
        buckets=_uses(subject, plan),
    )


def mean(values: npt.NDArray[Any]) -> float:
    """Return the mean; NaN for no values."""
    return float(values.mean()) if len(values) else math.nan


def _spread(values: FloatArray) -> Spread:
    return Spread(mean(values), *(float(take(values)) if len(values) else math.nan for take in (np.median, np.max)))


def _uses(subject: Subject, plan: EpochPlan) -> tuple[BucketUse, ...]:
    targets, table, config = subject.bucketed, subject.table, subject.config
    usable = np.where(has_bucket(targets.bucket_id), subject.times, 0)
    rows = np.repeat(np.arange(len(usable)), usable)
    ids = targets.bucket_id[rows].astype(np.int64)
    once = np.flatnonzero(has_bucket(targets.bucket_id))
    ids_once = targets.bucket_id[once].astype(np.int64)

    def count(bucket_ids: npt.NDArray[np.integer[Any]]) -> IntArray:
        return np.bincount(bucket_ids, minlength=len(table)).astype(np.int64)

    num_samples = count(ids)

    def mean_of(values: FloatArray) -> FloatArray:
        means, counts = np.full(len(table), np.nan), count(ids_once)
        np.divide(np.bincount(ids_once, values[once], len(table)), counts, out=means, where=counts > 0)
        return means

    batch_sizes, of_bucket = np.diff(plan.offsets), has_bucket(plan.bucket_ids)
    in_mixed = np.repeat(~of_bucket, batch_sizes)
    tokens = table.num_tokens(np.arange(len(table)), spec=subject.spec)
    columns = {
        "num_tokens": tokens,
        "cost": config.costs.cost(tokens + config.text_tokens),
        "num_samples": num_samples,
        **{name: mean_of(getattr(targets, name)) for name in ("kept_area", "kept_frames", "scale")},
        "enlarged": count(ids[targets.scale[rows] > 1]),
        "batches": count(plan.bucket_ids[of_bucket]),
        "short_batches": count(plan.bucket_ids[of_bucket & (batch_sizes < config.batch_size)]),
        "mixed_samples": count(targets.bucket_id[plan.indices[in_mixed]]),
        "dropped": num_samples - count(targets.bucket_id[plan.indices]),
    }
    return tuple(
        BucketUse(bucket_id=position, size=size, **{name: column[position].item() for name, column in columns.items()})
        for position, size in enumerate(table.sizes)
    )
