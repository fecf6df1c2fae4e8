"""The search for the nearest bucket, for many samples at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .assignment import Assignment, AssignmentRule, IntArray, Rejection, unusable
from .geometry import Size

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
