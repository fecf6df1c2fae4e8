"""Where samples go: a bucket, or a named reason why not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import BucketingError
from .sizes import Size

IntArray = npt.NDArray[np.int64]


class Rejection(IntEnum):
    """Why a sample has no bucket; `NONE` means that it has one."""

    NONE = 0
    ASPECT = 1
    """No bucket's aspect ratio is near enough."""
    TOO_SHORT = 2
    """Fewer frames than any bucket of its kind (images: one frame, videos: more)."""
    TOO_SMALL = 3
    """Every bucket would enlarge the sample by more than `max_upscale`."""
    UNREADABLE = 4
    """Its metadata could not be read (negative sizes)."""
    EMPTY = 5
    """It holds no frame or no pixel (a size of zero)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentRule:
    """How near a sample must come to its bucket.

    Args:
        metric (`"log"` or `"linear"`): Aspect ratios are compared as |ln(ratio ÷ bucket's ratio)|, which treats
            portrait and landscape alike, or as |ratio − bucket's ratio|, as NovelAI does.
        max_aspect_error (`float`, *optional*): Largest error in that metric. Defaults to ln 2 for `"log"`, which
            rejects a sample of which more than half would be cropped away, and to NovelAI's 4 for `"linear"`, where
            the error must stay below it.
        max_upscale (`float`): Largest factor by which cover-resize may enlarge a sample; 1.0 means never.

    Raises:
        BucketingError: On an unknown metric or a limit that is not above 0.
    """

    metric: Literal["log", "linear"] = "log"
    max_aspect_error: float | None = None
    max_upscale: float = 1.0

    def __post_init__(self) -> None:
        if self.metric not in ("log", "linear"):
            raise BucketingError(f'metric must be "log" or "linear", got {self.metric!r}.')
        if not self.max_upscale > 0 or (self.max_aspect_error is not None and not self.max_aspect_error > 0):
            raise BucketingError(f"max_upscale and max_aspect_error must be above 0, got {self}.")

    @property
    def aspect_limit(self) -> float:
        """The limit that holds: `max_aspect_error`, or the default of the metric."""
        if self.max_aspect_error is not None:
            return self.max_aspect_error
        return math.log(2) if self.metric == "log" else 4.0

    def is_near(self, error: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.bool_]:
        """Return whether aspect errors in the rule's metric are within its limit; shape as given."""
        return error <= self.aspect_limit if self.metric == "log" else error < self.aspect_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Where each sample goes.

    Attributes:
        bucket_id (`int32`, shape `(n,)`): Position in the table, −1 for a rejected sample.
        rejection (`int8`, shape `(n,)`): A [`Rejection`] per sample, 0 where there is none.
        aspect_error (`float32`, shape `(n,)`): Distance to the bucket's aspect ratio in the rule's metric, NaN if
            rejected.
    """

    bucket_id: npt.NDArray[np.int32]
    rejection: npt.NDArray[np.int8]
    aspect_error: npt.NDArray[np.float32]


def as_columns(*columns: npt.ArrayLike) -> tuple[IntArray, ...]:
    """Return the columns of frames, heights and widths as `int64` arrays of one length."""
    arrays = tuple(np.atleast_1d(np.asarray(column, np.int64)) for column in columns)
    if len({array.shape for array in arrays}) != 1:
        raise BucketingError(f"frames, heights and widths must be equally long, got {[a.shape for a in arrays]}.")
    return arrays


def unusable(*columns: IntArray) -> npt.NDArray[np.int8]:
    """Return `UNREADABLE` where a size is negative, `EMPTY` where it is zero, else `NONE`."""
    smallest = np.minimum.reduce(columns)
    return np.select([smallest < 0, smallest == 0], [Rejection.UNREADABLE, Rejection.EMPTY], 0).astype(np.int8)


FloatArray = npt.NDArray[np.float64]

_CHUNK = 1 << 16  # rows whose intermediate arrays fit into a processor's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The buckets of one number of frames and one tier, in order of aspect ratio.

    Between neighbours lies a boundary: a sample below or on it is nearer to the left one.
    """

    frames: int
    ids: npt.NDArray[np.int32]
    ratios: FloatArray
    boundaries: FloatArray
    least_heights: FloatArray
    least_widths: FloatArray


class BucketSearch:
    """Buckets arranged for searching.

    Args:
        sizes (sequence of [`Size`]): The buckets.
        tiers (sequence of `int`): One per bucket.
        rule ([`AssignmentRule`]): Metric and limits.
    """

    def __init__(self, sizes: Sequence[Size], tiers: Sequence[int], rule: AssignmentRule) -> None:
        self.rule = rule
        keys = [(size.frames, tier) for size, tier in zip(sizes, tiers, strict=True)]
        table = np.array(sizes, np.int64)
        self.groups = [
            self._group(table, np.flatnonzero([other == key for other in keys]))
            for key in sorted(set(keys), reverse=True)
        ]

    def _group(self, table: IntArray, members: IntArray) -> _Group:
        # Of equal ratios, unique keeps the one that stands first in the table.
        ratios, first = np.unique(table[members, 2] / table[members, 1], return_index=True)
        ids = members[first]
        left, right = ratios[:-1], ratios[1:]
        boundaries = np.sqrt(left * right) if self.rule.metric == "log" else (left + right) / 2
        right_is_first = ids[1:] < ids[:-1]
        boundaries[right_is_first] = np.nextafter(boundaries[right_is_first], 0)
        return _Group(
            frames=int(table[members[0], 0]),
            ids=ids.astype(np.int32),
            ratios=ratios,
            boundaries=boundaries,
            least_heights=table[ids, 1] / self.rule.max_upscale,
            least_widths=table[ids, 2] / self.rule.max_upscale,
        )

    def assign(self, frames: IntArray, heights: IntArray, widths: IntArray) -> Assignment:
        """Assign samples, all three arrays of shape `(n,)`, as [`BucketTable.assign`] describes."""
        count = len(frames)
        result = Assignment(
            bucket_id=np.full(count, -1, np.int32),
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
            self._assign_chunk(frames[part], heights[part], widths[part], chunk)
        return result

    def _assign_chunk(self, frames: IntArray, heights: IntArray, widths: IntArray, out: Assignment) -> None:
        waiting = out.rejection == Rejection.NONE
        out.rejection[waiting] = Rejection.TOO_SHORT
        for group in self.groups:
            kind = frames == 1 if group.frames == 1 else frames >= group.frames
            rows = np.flatnonzero(waiting & kind)
            if len(rows):
                sides = (heights, widths) if len(rows) == len(frames) else (heights[rows], widths[rows])
                self._assign_group(group, rows, sides, out)
                waiting[rows] = out.bucket_id[rows] < 0

    def _assign_group(self, group: _Group, rows: IntArray, sides: tuple[IntArray, IntArray], out: Assignment) -> None:
        height, width = sides
        ratio = width / height
        nearest = _count_below(group.boundaries, ratio)
        if self.rule.metric == "log":
            error = np.abs(np.log((ratio / group.ratios[nearest]).astype(np.float32)))
        else:
            error = np.abs(ratio - group.ratios[nearest]).astype(np.float32)
        near = self.rule.is_near(error)
        large = (height >= group.least_heights[nearest]) & (width >= group.least_widths[nearest])
        taken = near & large
        out.rejection[rows] = np.where(taken, Rejection.NONE, np.where(near, Rejection.TOO_SMALL, Rejection.ASPECT))
        out.bucket_id[rows] = np.where(taken, group.ids[nearest], -1)
        out.aspect_error[rows] = np.where(taken, error, np.nan)


def _count_below(boundaries: FloatArray, values: FloatArray) -> npt.NDArray[np.integer[Any]]:
    """Return for each value how many of the sorted boundaries lie below it."""
    if len(boundaries) > 64:
        return np.searchsorted(boundaries, values)
    # Few comparisons of whole arrays take a third of the time of as many binary searches.
    count = np.zeros(len(values), np.uint8)
    for boundary in boundaries:
        count += values > boundary
    return count
