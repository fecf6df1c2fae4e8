"""Samples of a report before and after they are assigned to buckets: histograms of all, and crops of some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray, column_values
from ..buckets.assignment import has_bucket
from ..buckets.sizes import Size, cover_resize, crop_box
from ..errors import BucketingError
from ..randomness import Purpose, generator
from .measure import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of several groups of samples in the same bins.

    Attributes:
        edges (`tuple[float, ...]`): Rising edges, one more than there are bins; a bin holds its lower edge, the last
            bin both.
        counts (mapping of `str` to `tuple[int, ...]`): Samples in each bin, by group.
    """

    edges: tuple[float, ...]
    counts: Mapping[str, tuple[int, ...]]


def aspect_histogram(subject: Subject, *, num_bins: int = 60) -> Histogram:
    """Count readable samples by aspect ratio (width ÷ height), those with a bucket and those rejected."""
    return _by_bucket(subject, subject.sizes.widths.clip(0) / np.maximum(subject.sizes.heights, 1), num_bins)


def token_histogram(subject: Subject, *, num_bins: int = 50) -> Histogram:
    """Count samples by their tokens, at the sizes of their buckets and at their own."""
    bucketed, packed = subject.bucketed.num_tokens, subject.packed.num_tokens
    groups = {"at their bucket's size": bucketed[bucketed > 0], "at their own size": packed[packed > 0]}
    return _in_log_bins(groups, num_bins)


def size_histogram(subject: Subject, *, num_bins: int = 50) -> Histogram:
    """Count readable samples by the square root of their frame's area, in pixels."""
    return _by_bucket(subject, np.sqrt(subject.sizes.heights.clip(0) * subject.sizes.widths.clip(0)), num_bins)


def duration_histogram(subject: Subject, fps: npt.ArrayLike | None, *, num_bins: int = 50) -> Histogram | None:
    """Count readable videos by their duration in seconds; None if no frame rate is known.

    Raises:
        BucketingError: If there are not as many frame rates as samples.
    """
    rates = np.zeros(0) if fps is None else column_values(fps, np.float64)
    if not np.any(rates > 0):
        return None
    if len(rates) != len(subject.sizes.frames):
        raise BucketingError(f"Expected {len(subject.sizes.frames)} frame rates, one per sample, got {len(rates)}.")
    seconds = np.divide(subject.sizes.frames, rates, out=np.zeros(len(rates)), where=rates > 0)
    return _by_bucket(subject, seconds, num_bins)


def _by_bucket(subject: Subject, values: FloatArray, num_bins: int) -> Histogram:
    """Count positive values of readable samples, those with a bucket and those rejected."""
    kept = has_bucket(subject.bucketed.bucket_id)
    known = (np.minimum.reduce(subject.sizes) > 0) & (values > 0)
    return _in_log_bins({"with a bucket": values[known & kept], "rejected": values[known & ~kept]}, num_bins)


def _in_log_bins(groups: Mapping[str, npt.NDArray[np.number[Any]]], num_bins: int) -> Histogram:
    """Count in bins of equal ratio that hold all values."""
    values = np.concatenate([np.asarray(group, np.float64) for group in groups.values()])
    low, high = (values.min(), values.max()) if len(values) else (1.0, 1.0)
    edges = np.geomspace(low / 1.05, high * 1.05, num_bins + 1)
    counts = {name: tuple(np.histogram(group, edges)[0].tolist()) for name, group in groups.items()}
    return Histogram(edges=tuple(edges.tolist()), counts=counts)


WORST_BUCKETS = 6
"""Buckets of which the worst crops are shown."""
PER_BUCKET = 3
"""Samples that are shown of each of them."""
RANDOM_SAMPLES = 24
"""Samples that are shown as the model sees them."""


class SampleCrop(NamedTuple):
    """A sample and what its bucket keeps of it.

    Attributes:
        row (`int`): Row of the data set.
        bucket_id (`int`): Its bucket.
        size ([`Size`][hf_bucketing.Size]): Frames, height and width of the sample.
        target ([`Size`][hf_bucketing.Size]): Those of the bucket.
        kept_area (`float`): Share of the frame inside the bucket.
        kept_frames (`float`): Share of the frames that the bucket has.
    """

    row: int
    bucket_id: int
    size: Size
    target: Size
    kept_area: float
    kept_frames: float

    def box(self) -> tuple[float, float, float, float]:
        """Return left, top, width and height of what a crop in the centre keeps, as shares of the frame's sides."""
        height, width = cover_resize(self.size.height, self.size.width, target=self.target)
        kept = crop_box(height, width, target=self.target)
        return kept.left / width, kept.top / height, kept.width / width, kept.height / height


def worst_crops(subject: Subject) -> tuple[SampleCrop, ...]:
    """Return samples that are cropped, of the buckets that crop one of their samples most; the worst bucket first."""
    targets = subject.bucketed
    rows = np.flatnonzero(has_bucket(targets.bucket_id) & (targets.kept_area < 1))
    rows = rows[np.lexsort((rows, targets.kept_area[rows], targets.bucket_id[rows]))]
    starts = np.unique(targets.bucket_id[rows], return_index=True)[1]
    ends = np.minimum(np.append(starts[1:], len(rows)), starts + PER_BUCKET)
    worst = np.argsort(targets.kept_area[rows[starts]], kind="stable")[:WORST_BUCKETS]
    return _crops(subject, [row for group in worst.tolist() for row in rows[starts[group] : ends[group]].tolist()])


def random_samples(subject: Subject) -> tuple[SampleCrop, ...]:
    """Return samples that have a bucket, drawn by the report's seed, in the order of their rows."""
    rows = np.flatnonzero(has_bucket(subject.bucketed.bucket_id))
    rng = generator(Purpose.REPORT_SAMPLES, subject.config.seed)
    return _crops(subject, np.sort(rng.choice(rows, min(RANDOM_SAMPLES, len(rows)), replace=False)).tolist())


def _crops(subject: Subject, rows: Sequence[int]) -> tuple[SampleCrop, ...]:
    targets = subject.bucketed
    return tuple(
        SampleCrop(
            row=row,
            bucket_id=int(targets.bucket_id[row]),
            size=Size(*(int(column[row]) for column in subject.sizes)),
            target=Size(*(int(column[row]) for column in targets.sizes)),
            kept_area=float(targets.kept_area[row]),
            kept_frames=float(targets.kept_frames[row]),
        )
        for row in rows
    )
