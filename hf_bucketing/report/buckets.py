"""What a bucket table does to a data set: how full each bucket is, what it keeps, and how its batches come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray, IntArray
from ..buckets.assignment import count_rejections
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..plans.epoch import EpochPlan
from .config import ReportConfig, SizeColumns
from .plans import plan_bucketing
from .targets import Sizes, Targets, bucket_targets, kept_area, kept_frames, read_sizes, resize_scale
from .values import as_json


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUse:
    """One bucket: its size, what it does to its samples, and its part in one epoch's plan.

    Attributes:
        bucket_id (`int`): Position in the table.
        size ([`Size`][hf_bucketing.Size]): Of the bucket.
        num_tokens (`int`): Per sample.
        cost (`float`): Of one sample, in floating-point operations of one transformer block's forward pass.
        entries (`int`): Samples assigned to it. Where there are none, the three means below are NaN.
        kept_area (`float`): Mean share of the samples' frames that lies inside the bucket after cover-resize.
        kept_frames (`float`): Mean share of the samples' frames that the bucket has.
        scale (`float`): Mean factor by which cover-resize scales a side; above 1 it enlarges.
        enlarged (`int`): Samples with a factor above 1.
        batches (`int`): Batches of this bucket on all processes together, short ones included.
        short_batches (`int`): Those that hold fewer than `batch_size` samples.
        mixed_samples (`int`): Samples that come in mixed steps, one per process, whose processes hold several buckets.
        left_out (`int`): Samples that no batch of this epoch holds.
    """

    bucket_id: int
    size: Size
    num_tokens: int
    cost: float
    entries: int
    kept_area: float
    kept_frames: float
    scale: float
    enlarged: int
    batches: int
    short_batches: int
    mixed_samples: int
    left_out: int


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
        rejections (mapping of `str` to `int`): Rows without a bucket, by the label of their
            [`Rejection`][hf_bucketing.Rejection].
        aspect_error ([`Spread`]): Of |ln(aspect ratio of a sample ÷ of its bucket)|.
        aspect_difference ([`Spread`]): Of |aspect ratio of a sample − of its bucket|, as NovelAI prints it.
        kept_area (`float`): Mean over all samples with a bucket, as in [`BucketUse`]; NaN if there is none.
        enlarged (`int`): Samples that their bucket enlarges.
        num_steps (`int`): Steps of an epoch, on each process.
        mixed_steps (`int`): Those whose processes hold several buckets.
        buckets (`tuple[BucketUse, ...]`): In the order of the table.
    """

    num_samples: int
    rejections: Mapping[str, int]
    aspect_error: Spread
    aspect_difference: Spread
    kept_area: float
    enlarged: int
    num_steps: int
    mixed_steps: int
    buckets: tuple[BucketUse, ...]

    @property
    def skipped(self) -> int:
        """Rows without a bucket."""
        return sum(self.rejections.values())

    @property
    def used(self) -> tuple[BucketUse, ...]:
        """Buckets that hold a sample, the fullest first, equal ones in the order of the table."""
        return tuple(sorted((bucket for bucket in self.buckets if bucket.entries), key=lambda bucket: -bucket.entries))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, NaN as None."""
        return {**as_json(self), "skipped": self.skipped}


def describe_buckets(
    columns: SizeColumns, table: BucketTable, *, spec: LatentSpec, config: ReportConfig
) -> BucketReport:
    """Assign all samples, plan one epoch, and count.

    Args:
        columns ([`SizeColumns`]): Sizes of all rows.
        table ([`BucketTable`][hf_bucketing.BucketTable]): Where they go.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model, which make tokens of pixels.
        config ([`ReportConfig`]): Batch size, processes and cost.

    Returns:
        [`BucketReport`]: With no step if fewer samples than processes have a bucket.

    Raises:
        BucketingError: If there is no row, or a bucket does not divide into whole tokens.
    """
    sizes = read_sizes(columns)
    targets = bucket_targets(sizes, table, spec=spec, config=config)
    plan = plan_bucketing(targets, config)
    rows = np.flatnonzero(targets.bucket_id >= 0)
    ratio, target_ratio = (side.widths[rows] / side.heights[rows] for side in (sizes, targets.sizes))
    scale, area = resize_scale(sizes, targets.sizes)[rows], kept_area(sizes, targets.sizes)[rows]
    return BucketReport(
        num_samples=len(targets.bucket_id),
        rejections=count_rejections(targets.rejection),
        aspect_error=_spread(np.abs(np.log(ratio / target_ratio))),
        aspect_difference=_spread(np.abs(ratio - target_ratio)),
        kept_area=float(area.mean()) if len(rows) else float("nan"),
        enlarged=int(np.count_nonzero(scale > 1)),
        num_steps=plan.num_steps,
        mixed_steps=plan.num_mixed_steps,
        buckets=_uses(table, sizes, targets, plan=plan, spec=spec, config=config),
    )


def _spread(values: FloatArray) -> Spread:
    if not len(values):
        return Spread(*[float("nan")] * 3)
    return Spread(float(values.mean()), float(np.median(values)), float(values.max()))


def _uses(
    table: BucketTable, sizes: Sizes, targets: Targets, *, plan: EpochPlan, spec: LatentSpec, config: ReportConfig
) -> tuple[BucketUse, ...]:
    rows = np.flatnonzero(targets.bucket_id >= 0)
    ids = targets.bucket_id[rows].astype(np.int64)

    def count(bucket_ids: npt.NDArray[np.integer[Any]]) -> IntArray:
        return np.bincount(bucket_ids, minlength=len(table)).astype(np.int64)

    def mean(values: FloatArray) -> FloatArray:
        means, entries = np.full(len(table), np.nan), count(ids)
        np.divide(np.bincount(ids, values[rows], len(table)), entries, out=means, where=entries > 0)
        return means

    scale = resize_scale(sizes, targets.sizes)
    batch_sizes, of_bucket = np.diff(plan.offsets), plan.bucket_ids >= 0
    in_mixed = np.repeat(~of_bucket, batch_sizes)
    tokens = table.num_tokens(np.arange(len(table)), spec=spec)
    columns = {
        "num_tokens": tokens,
        "cost": config.cost_model.cost(tokens),
        "entries": count(ids),
        "kept_area": mean(kept_area(sizes, targets.sizes)),
        "kept_frames": mean(kept_frames(sizes, targets.sizes)),
        "scale": mean(scale),
        "enlarged": count(ids[scale[rows] > 1]),
        "batches": count(plan.bucket_ids[of_bucket]),
        "short_batches": count(plan.bucket_ids[of_bucket & (batch_sizes < config.batch_size)]),
        "mixed_samples": count(targets.bucket_id[plan.indices[in_mixed]]),
        "left_out": count(ids) - count(targets.bucket_id[plan.indices]),
    }
    return tuple(
        BucketUse(bucket_id=position, size=size, **{name: column[position].item() for name, column in columns.items()})
        for position, size in enumerate(table.sizes)
    )
