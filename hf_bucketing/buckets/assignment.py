"""Assign samples to buckets, or reject them for a named reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import reduce
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import BucketingError
from .arrays import BoolArray, FloatArray, IntArray, column_values
from .sizes import Size

Metric = Literal["log", "linear"]

REJECTED_BUCKET = -1
"""The `bucket_id` of a rejected sample."""

CAPTION_SIZE = -2
"""Width, height and number of frames of a row that is rejected for its caption; those of unreadable rows are −1.

Such a row has no valid size, so it is rejected wherever sizes are turned into buckets or tokens, for a known reason.
"""

CAPTION_PROBLEM = "caption_problem"
"""Column of what is wrong with the captions for which rows are rejected, such as `"missing"`; only if some are."""

CONDITION_SIZE = -3
"""Width, height and number of frames of a row that is rejected for what its sample would be shown."""

CLIP_SIZE = -4
"""Width, height and number of frames of a row that is rejected because its clip does not lie in its file."""

DETOUR = 0.06
"""Largest |ln(aspect ratio ÷ bucket's)| of a bucket that replaces a nearer one: it crops away 5.8 % at most."""

_CHUNK = 1 << 16  # rows whose intermediate arrays fit into a processor's cache
_CELL_BITS = 43  # the leading bits of a float64 make cells of ratios, 512 per power of two
_FIRST_CELL, _LAST_CELL = ((1023 + power) << 52 - _CELL_BITS for power in (-6, 6))


class Rejection(IntEnum):
    """Reason why a sample has no bucket; `NONE` means that it has one.

    Example:
        >>> Rejection.TOO_SMALL.label
        'too_small'
    """

    NONE = 0
    ASPECT = 1
    """No bucket has a similar aspect ratio."""
    TOO_SHORT = 2
    """The sample has fewer frames than any bucket of its kind (images: one frame, videos: more)."""
    TOO_SMALL = 3
    """Every bucket of a similar aspect ratio would enlarge the sample by more than `max_upscale`."""
    UNREADABLE = 4
    """The metadata of the sample could not be read (negative sizes)."""
    EMPTY = 5
    """The sample holds no frame or no pixel (a size of zero)."""
    CAPTION = 6
    """The caption is missing or no text (sizes of `CAPTION_SIZE`)."""
    CONDITION = 7
    """A condition, such as a mask, is missing or does not fit its sample (sizes of `CONDITION_SIZE`)."""
    CLIP = 8
    """The clip does not lie in its file (sizes of `CLIP_SIZE`)."""
    TOO_LARGE = 9
    """No pack holds the sample: it has more tokens than those of the run, or than the model has positions for."""

    @property
    def label(self) -> str:
        """Name of the reason in a `rejection` column, such as `"too_small"`."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentRule:
    """Limits on the difference between a sample and its bucket.

    Args:
        metric (`"log"` or `"linear"`): Distance of two aspect ratios: |ln(ratio ÷ bucket's ratio)|, which treats
            portrait and landscape alike, or |ratio − bucket's ratio|, as NovelAI does.
        max_aspect_error (`float`, *optional*): Largest error in that metric. Defaults to ln 2 for `"log"`, which
            rejects a sample of which more than half would be cropped away, and to NovelAI's 4 for `"linear"`, where
            the error must stay below it.
        max_upscale (`float`): Largest factor by which cover-resize may enlarge a sample; 1.0 means never.

    Raises:
        BucketingError: On an unknown metric or a limit that is not above 0.
    """

    metric: Metric = field(default="log", metadata={"flag": False})
    max_aspect_error: float | None = field(default=None, metadata={"infinite": True})
    max_upscale: float = field(default=1.0, metadata={"infinite": True})

    def __post_init__(self) -> None:
        if self.metric not in ("log", "linear"):
            raise BucketingError(f'`metric` must be "log" or "linear", got {self.metric!r}.')
        if not self.max_upscale > 0 or (self.max_aspect_error is not None and not self.max_aspect_error > 0):
            raise BucketingError(f"`max_upscale` and `max_aspect_error` must be above 0, got {self}.")

    @classmethod
    def novelai(cls) -> AssignmentRule:
        """Return NovelAI's rule: the nearest aspect ratio, a linear error below 4, and images enlarged at will."""
        return cls(metric="linear", max_upscale=math.inf)

    @property
    def aspect_limit(self) -> float:
        """Largest aspect error: `max_aspect_error`, or the default of the metric."""
        if self.max_aspect_error is not None:
            return self.max_aspect_error
        return math.log(2) if self.metric == "log" else 4.0

    def is_near(self, error: npt.NDArray[np.floating[Any]]) -> BoolArray:
        """Return whether aspect errors, in the rule's metric, are within its limit; shape as given."""
        return error <= self.aspect_limit if self.metric == "log" else error < self.aspect_limit

    def near_ratios(self, ratio: float) -> tuple[float, float]:
        """Return the lowest and the highest aspect ratio that the rule takes for near to one."""
        if self.metric == "linear":
            return ratio - self.aspect_limit, ratio + self.aspect_limit
        return ratio * math.exp(-self.aspect_limit), ratio * math.exp(min(self.aspect_limit, 700))  # no overflow

    def boundaries(self, left: FloatArray | float, right: FloatArray) -> FloatArray:
        """Return the aspect ratios that are as near to a ratio as to another; shape as given."""
        return np.sqrt(left * right) if self.metric == "log" else (left + right) / 2

    def least_sides(self, sides: IntArray) -> IntArray:
        """Return the fewest pixels that fill sides of buckets without too much enlargement; shape as given."""
        return np.ceil(sides / self.max_upscale).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The buckets and rejections of samples.

    Attributes:
        bucket_id (`int32`, shape `(n,)`): Position in the table, `REJECTED_BUCKET` (−1) for a rejected
            sample.
        rejection (`int8`, shape `(n,)`): [`Rejection`] of each sample, 0 for none.
        aspect_error (`float32`, shape `(n,)`): Distance to the aspect ratio of the bucket in the rule's metric, NaN
            for a rejected sample.
    """

    bucket_id: npt.NDArray[np.int32]
    rejection: npt.NDArray[np.int8]
    aspect_error: npt.NDArray[np.float32]


def has_bucket(bucket_ids: npt.NDArray[np.integer[Any]]) -> BoolArray:
    """Return which ids are buckets; shape as given.

    No bucket: [`REJECTED_BUCKET`], and the marks of batches in a plan, which are lower.
    """
    return bucket_ids > REJECTED_BUCKET


def as_columns(*columns: npt.ArrayLike) -> tuple[IntArray, ...]:
    """Return columns of frames, heights and widths as `int64` arrays of one length."""
    arrays = tuple(np.atleast_1d(column_values(column, np.int64)) for column in columns)
    if len({array.shape for array in arrays}) != 1:
        raise BucketingError(f"frames, heights and widths must be equally long, got {[a.shape for a in arrays]}.")
    return arrays


def unusable(*columns: IntArray) -> npt.NDArray[np.int8]:
    """Return the rejections that follow from sizes alone: `EMPTY` (zero), `UNREADABLE` (negative), and marks."""
    smallest = reduce(np.minimum, columns)
    rejection = np.zeros(len(smallest), np.int8)
    bad = np.flatnonzero(smallest < 1)
    if len(bad):
        rejection[bad] = np.where(smallest[bad] < 0, Rejection.UNREADABLE, Rejection.EMPTY)
        marks = ((CAPTION_SIZE, Rejection.CAPTION), (CONDITION_SIZE, Rejection.CONDITION), (CLIP_SIZE, Rejection.CLIP))
        for mark, reason in marks:
            rejection[bad[np.logical_and.reduce([column[bad] == mark for column in columns])]] = reason
    return rejection


def count_rejections(rejection: npt.ArrayLike, *, times: IntArray | None = None) -> dict[str, int]:
    """Return how many samples were rejected for each reason that occurs, by its label, in the order of [`Rejection`].

    Args:
        rejection (array, shape `(n,)`): A `rejection` column, or the numbers of an [`Assignment`].
        times (array of `int`, shape `(n,)`, *optional*): How often each sample counts; by default once.

    Example:
        >>> count_rejections(["too_small", "none", "aspect", "too_small"])
        {'aspect': 1, 'too_small': 2}
    """
    values = column_values(rejection)
    counts = {}
    for reason in Rejection:
        if reason != Rejection.NONE:
            rejected = values == (reason.label if values.dtype.kind in "UO" else reason)
            counts[reason.label] = int(np.count_nonzero(rejected) if times is None else times[rejected].sum())
    return {label: count for label, count in counts.items() if count}


class _Samples(NamedTuple):
    """Sizes of samples and values derived from them for the search, all of shape `(n,)`."""

    heights: IntArray
    widths: IntArray
    ratios: FloatArray
    logarithms: FloatArray
    cells: IntArray

    @classmethod
    def of(cls, heights: IntArray, widths: IntArray) -> _Samples:
        with np.errstate(divide="ignore", invalid="ignore"):  # unusable samples, which are never searched for
            ratios = widths / heights
            return cls(heights, widths, ratios, np.log(ratios), _cells(ratios))

    def select(self, rows: IntArray | slice) -> _Samples:
        sizes = self.heights[rows], self.widths[rows]
        return _Samples(*sizes, self.ratios[rows], self.logarithms[rows], self.cells[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The buckets of one number of frames and one tier, by rising aspect ratio.

    Attributes:
        boundaries: Aspect ratios between neighbours; a sample below or on one is nearer to the left bucket.
        below: Number of boundaries in the cells below each cell of ratios; None if a cell holds two.
        least_heights: Fewest rows of pixels of a sample that fills each bucket.
        least_widths: Fewest columns of pixels of a sample that fills each bucket.
        least_area: Fewest pixels of a sample that fills any of the buckets.
        neighbours: Largest distance, in positions, from the nearest bucket to one within `DETOUR`.
    """

    frames: int
    ids: npt.NDArray[np.int32]
    ratios: FloatArray
    logarithms: FloatArray
    boundaries: FloatArray
    below: IntArray | None
    least_heights: IntArray
    least_widths: IntArray
    least_area: int
    neighbours: int

    def nearest(self, samples: _Samples) -> IntArray:
        """Return the position of the bucket nearest to each sample."""
        if self.below is None:
            return np.searchsorted(self.boundaries[:-1], samples.ratios).astype(np.int64)
        below: IntArray = self.below.take(samples.cells, mode="clip")
        return below + (samples.ratios > self.boundaries.take(below))

    def is_filled(self, bucket: IntArray, samples: _Samples) -> BoolArray:
        """Return whether each sample fills its bucket without too much enlargement."""
        high: BoolArray = samples.heights >= self.least_heights.take(bucket)
        return high & (samples.widths >= self.least_widths.take(bucket))


class BucketSearch:
    """Search structure over the buckets of a table.

    Args:
        sizes (sequence of [`Size`]): Sizes of the buckets.
        tiers (sequence of `int`): Tier of each bucket.
        rule ([`AssignmentRule`]): Metric and limits.
    """

    def __init__(self, sizes: Sequence[Size], tiers: Sequence[int], rule: AssignmentRule) -> None:
        self.rule = rule
        table, keys = np.array(sizes, np.int64), np.array([(size.frames, 0) for size in sizes], np.int64)
        keys[:, 1] = tiers
        self.groups = [
            self._group(table, np.flatnonzero((keys == key).all(axis=1))) for key in np.unique(keys, axis=0)[::-1]
        ]

    def _group(self, table: IntArray, members: IntArray) -> _Group:
        # unique keeps the bucket that comes first in the table among those of equal ratio.
        ratios, first = np.unique(table[members, 2] / table[members, 1], return_index=True)
        ids = members[first]
        left, right = ratios[:-1], ratios[1:]
        boundaries = self.rule.boundaries(left, right)
        right_is_first = ids[1:] < ids[:-1]
        boundaries[right_is_first] = np.nextafter(boundaries[right_is_first], 0)
        least_heights, least_widths = self.rule.least_sides(table[ids, 1:]).T.copy()
        logarithms = np.log(ratios)
        # The sample lies up to half a gap beyond the nearest bucket, and another one up to DETOUR beyond the sample.
        reach = logarithms + np.append(np.diff(logarithms) / 2, 0) + DETOUR
        last = np.searchsorted(logarithms, reach, side="right")
        return _Group(
            frames=int(table[members[0], 0]),
            ids=ids.astype(np.int32),
            ratios=ratios,
            logarithms=logarithms,
            boundaries=np.append(boundaries, np.inf),
            below=_count_by_cell(boundaries),
            least_heights=least_heights,
            least_widths=least_widths,
            least_area=int((least_heights * least_widths).min()),
            neighbours=int((last - np.arange(len(ids))).max()) - 1,
        )

    def assign(self, frames: IntArray, heights: IntArray, widths: IntArray) -> Assignment:
        """Assign samples, all three arrays of shape `(n,)`, as [`BucketTable.assign`] describes."""
        count = len(frames)
        result = Assignment(
            bucket_id=np.full(count, REJECTED_BUCKET, np.int32),
            rejection=unusable(frames, heights, widths),
            aspect_error=np.full(count, np.nan, np.float32),
        )
        for start in range(0, count, _CHUNK):
            part = slice(start, start + _CHUNK)
            chunk = Assignment(
                bucket_id=result.bucket_id[part],
                rejection=result.rejection[part],
                aspect_error=result.aspect_error[part],
            )
            self._assign_chunk(frames[part], _Samples.of(heights[part], widths[part]), chunk)
        return result

    def _assign_chunk(self, frames: IntArray, samples: _Samples, out: Assignment) -> None:
        waiting = out.rejection == Rejection.NONE
        area = samples.heights * samples.widths
        for group in self.groups:
            of_kind = waiting & _of_kind(group, frames)
            large = of_kind & (area >= group.least_area)
            # Copying the rows of a nearly full chunk costs more than searching for those that are too small.
            rows = _rows(of_kind if np.count_nonzero(large) > 0.75 * len(large) else large)
            if rows is not None:
                out.bucket_id[rows], out.aspect_error[rows] = self._assign_group(group, samples.select(rows))
                waiting[rows] = ~has_bucket(out.bucket_id[rows])
        rows = _rows(waiting)
        if rows is not None:
            out.rejection[rows] = self._reasons(frames[rows], samples.select(rows))

    def _assign_group(self, group: _Group, samples: _Samples) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return the bucket of each sample, `REJECTED_BUCKET` without one, and its aspect error, NaN without one."""
        bucket = group.nearest(samples)
        error = self._error(group, bucket, samples)
        near = self.rule.is_near(error)
        taken = near & group.is_filled(bucket, samples)
        ids, errors = group.ids[bucket], error
        ids[~taken], errors[~taken] = REJECTED_BUCKET, np.nan
        if group.neighbours:
            others = np.flatnonzero(near & ~taken)
            self._detour(group, bucket[others], samples.select(others), rows=others, out=(ids, errors))
        return ids, errors

    def _error(self, group: _Group, bucket: IntArray, samples: _Samples) -> npt.NDArray[np.float32]:
        """Return the distance of each sample to a bucket in the rule's metric."""
        if self.rule.metric == "log":
            return np.abs(samples.logarithms - group.logarithms[bucket]).astype(np.float32)
        return np.abs(samples.ratios - group.ratios[bucket]).astype(np.float32)

    def _detour(
        self,
        group: _Group,
        nearest: IntArray,
        samples: _Samples,
        *,
        rows: IntArray,
        out: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]],
    ) -> None:
        """Reassign samples that their nearest bucket would enlarge to the next nearest within DETOUR that does not."""
        least = np.full(len(nearest), np.inf)
        for step in (*range(-group.neighbours, 0), *range(1, group.neighbours + 1)):
            bucket = np.clip(nearest + step, 0, len(group.ids) - 1)
            distance = np.abs(samples.logarithms - group.logarithms[bucket])
            better = np.flatnonzero((distance <= DETOUR) & (distance < least))
            better = better[group.is_filled(bucket[better], samples.select(better))]
            error = self._error(group, bucket[better], samples.select(better))
            within = self.rule.is_near(error)
            better = better[within]
            least[better] = distance[better]
            out[0][rows[better]], out[1][rows[better]] = group.ids[bucket[better]], error[within]

    def _reasons(self, frames: IntArray, samples: _Samples) -> npt.NDArray[np.int8]:
        """Return why samples have no bucket: none has so few frames, a similar ratio, or a size that they fill."""
        reason = np.full(len(frames), Rejection.TOO_SHORT, np.int8)
        for group in reversed(self.groups):
            rows = _rows(_of_kind(group, frames) & (reason != Rejection.TOO_SMALL))
            if rows is not None:
                chosen = samples.select(rows)
                near = self.rule.is_near(self._error(group, group.nearest(chosen), chosen))
                reason[rows] = np.where(near, Rejection.TOO_SMALL, Rejection.ASPECT)
        return reason


def _of_kind(group: _Group, frames: IntArray) -> BoolArray:
    """Return which samples may take the group's number of frames: one for images, at most their own for videos."""
    return frames == 1 if group.frames == 1 else frames >= group.frames


def _rows(mask: BoolArray) -> IntArray | slice | None:
    """Return the rows of a mask to index with: a slice for all, which copies nothing, and None for none."""
    count = np.count_nonzero(mask)
    if not count:
        return None
    return slice(None) if count == len(mask) else np.flatnonzero(mask)


def _cells(ratios: FloatArray) -> IntArray:
    """Return the cell of each ratio; cells rise with the ratio, as the bits of positive floats do.

    Extreme ratios have cells below 0 or beyond the last one.
    """
    return (ratios.view(np.int64) >> _CELL_BITS) - _FIRST_CELL


def _count_by_cell(boundaries: FloatArray) -> IntArray | None:
    """Return how many boundaries lie below each cell, None if a cell holds two."""
    last = _LAST_CELL - _FIRST_CELL
    per_cell = np.bincount(_cells(boundaries).clip(0, last), minlength=last + 1)
    return None if per_cell.max() > 1 else np.cumsum(per_cell) - per_cell
