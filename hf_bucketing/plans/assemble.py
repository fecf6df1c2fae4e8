"""Assemble an epoch plan from dealt rows: order, labels and counts."""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from ..errors import PlanError
from .deal import CATCH_ALL, Steps, ranges
from .epoch import MIXED, EpochPlan
from .rows import EpochRows

_CHUNK = 2**22


def take_segments(values: IntArray, first: IntArray, lengths: IntArray) -> IntArray:
    """Concatenate `values[f : f + n]` for each first position f and length n.

    Works in pieces, to need little memory besides the result.

    Example:
        >>> take_segments(np.array([5, 6, 7, 8]), np.array([2, 0]), np.array([2, 1]))
        array([7, 8, 5])
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    taken = np.empty(total, np.int64)
    bounds = [*np.searchsorted(ends, np.arange(0, total, _CHUNK), side="right").tolist(), len(lengths)]
    for low, high in pairwise(bounds):
        count = lengths[low:high]
        start = int(ends[low - 1]) if low else 0
        taken[start : start + int(count.sum())] = values[np.repeat(first[low:high], count) + ranges(count)]
    return taken


def lockstep_plan(
    rows: IntArray,
    steps: Steps,
    *,
    bucket_ids: IntArray,
    base: int | None,
    chosen: EpochRows,
    filled: int = 0,
) -> EpochPlan:
    """Make a plan of steps in which every process takes `steps.size` samples, starting at `steps.first`."""
    num_processes = chosen.num_processes
    indices = take_segments(rows, steps.first, steps.size * num_processes)
    offsets = np.concatenate([[0], np.cumsum(np.repeat(steps.size, num_processes))])
    labels = np.repeat(steps.bucket, num_processes).astype(np.int32)
    caught = np.flatnonzero(labels == CATCH_ALL)
    if base is not None:
        labels[caught] = labels_of(bucket_ids, indices, offsets[caught], offsets[caught + 1], base=base)
    return counted_plan(indices, offsets, labels, chosen=chosen, filled=filled)


def labels_of(bucket_ids: IntArray, indices: IntArray, start: IntArray, stop: IntArray, *, base: int) -> IntArray:
    """Return the bucket of each batch `indices[start:stop]`: that of its rows, or `base` if they have several."""
    if not len(start):
        return np.zeros(0, np.int64)
    ids = bucket_ids[take_segments(indices, start, stop - start)]
    first = np.cumsum(stop - start) - (stop - start)
    low, high = np.minimum.reduceat(ids, first), np.maximum.reduceat(ids, first)
    return np.where(low == high, low, base)


def unbucketed_plan(rows: IntArray, first: IntArray, sizes: IntArray, *, label: int, chosen: EpochRows) -> EpochPlan:
    """Make a plan of the batches `rows[first : first + size]`, all with the same label."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    labels = np.full(len(sizes), label, np.int32)
    return counted_plan(take_segments(rows, first, sizes), offsets, labels, chosen=chosen, rest=label)


def counted_plan(
    indices: IntArray,
    offsets: IntArray,
    labels: IntArray | npt.NDArray[np.int32],
    *,
    chosen: EpochRows,
    filled: int = 0,
    rest: int = MIXED,
) -> EpochPlan:
    """Make a plan and count what it keeps, repeats and drops; rows without another reason are the `remainder`.

    `filled` of the indices repeat a row only to complete a batch. For evaluation, the remainder makes one more step of
    one row per process, labelled `rest`, in which the last processes repeat what the first ones have.
    """
    if chosen.evaluation and len(left := np.setdiff1d(chosen.rows, indices, assume_unique=True)):
        filled = chosen.num_processes - len(left)
        indices = np.concatenate([indices, np.resize(left, chosen.num_processes)])
        offsets = np.concatenate([offsets, offsets[-1] + 1 + np.arange(chosen.num_processes)])
        labels = np.concatenate([labels, np.full(chosen.num_processes, rest)])
    reasons = {**chosen.drop_reasons, "remainder": len(chosen.rows) - (len(indices) - filled)}
    repeats = filled > 0 or chosen.repeats
    return EpochPlan(
        indices=indices,
        offsets=offsets,
        bucket_ids=labels.astype(np.int32, copy=False),
        num_processes=chosen.num_processes,
        # Completing steps drops no row, and may take consumed rows, which this plan does not keep.
        repeated=len(indices) - _count_different(chosen.rows if filled else indices) if repeats else 0,
        drop_reasons=MappingProxyType({reason: count for reason, count in reasons.items() if count}),
        consumed=chosen.consumed,
    )


def with_steps(plan: EpochPlan, remainder: str, chosen: EpochRows) -> EpochPlan:
    """Return the plan of a new epoch, or raise PlanError if it has no step."""
    if not plan.num_steps and not chosen.consumed:
        hint = ' under `remainder="drop"`; use `remainder="short"` or smaller batches' if remainder == "drop" else ""
        raise PlanError(f"{chosen} do not fill one step of {chosen.num_processes} processes{hint}.")
    return plan


def _count_different(indices: IntArray) -> int:
    seen = np.zeros(int(indices.max()) + 1 if len(indices) else 0, bool)
    seen[indices] = True
    return int(np.count_nonzero(seen))
