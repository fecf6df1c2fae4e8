"""Assemble an epoch plan from dealt rows: batches of similar cost in one step, order, labels and counts."""

from __future__ import annotations

import heapq
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray, IntArray
from ..errors import PlanError
from .deal import CATCH_ALL, Steps, ranges
from .epoch import MIXED, EpochPlan
from .rows import EpochRows

_SORTED_STEPS = 64


def split_largest(offsets: IntArray, num_processes: int) -> IntArray | None:
    """Halve the batches with the most samples until the number of batches is a multiple of `num_processes`.

    Takes and returns bounds of batches, shape `(num_batches + 1,)`; None if there are too few samples.

    Example:
        >>> split_largest(np.array([0, 5, 6, 8]), 5)
        array([0, 2, 3, 5, 6, 8])
        >>> split_largest(np.array([0, 1, 2]), 3) is None
        True
    """
    missing = -(len(offsets) - 1) % num_processes
    if offsets[-1] < len(offsets) - 1 + missing:
        return None
    sizes = np.diff(offsets)
    largest = np.argsort(-sizes, kind="stable")[:missing]
    heap = [(-int(sizes[batch]), int(offsets[batch]), int(offsets[batch + 1])) for batch in largest]
    heapq.heapify(heap)
    cuts = []
    for _ in range(missing):
        _, start, stop = heapq.heappop(heap)
        cut = (start + stop + 1) // 2
        cuts.append(cut)
        heapq.heappush(heap, (start - cut, start, cut))
        heapq.heappush(heap, (cut - stop, cut, stop))
    return np.sort(np.concatenate([offsets, np.array(cuts, np.int64)]))


def even_batches(rows: IntArray, offsets: IntArray, chosen: EpochRows) -> tuple[IntArray, IntArray]:
    """Split the batches with the most samples until all processes get equally many; return the rows and the bounds.

    With fewer samples than batches, each sample becomes a batch, and fewer than `num_processes` samples are dropped.
    """
    even = split_largest(offsets, chosen.num_processes)
    if even is not None:
        return rows, even
    rows = np.delete(rows, chosen.spare(len(rows)))
    return rows, np.arange(len(rows) + 1)


def similar_costs_together(costs: FloatArray, num_processes: int, *, rng: np.random.Generator) -> IntArray:
    """Return an order of the batches in which those of one step have similar costs.

    The batches of 64 random steps are sorted by cost, and neighbours meet in a step. The number of costs, one per
    batch, is a multiple of `num_processes`.
    """
    order = rng.permutation(len(costs))
    window = np.arange(len(costs)) // (_SORTED_STEPS * num_processes)
    order = order[np.lexsort((costs[order], window))]
    return rng.permutation(order.reshape(-1, num_processes)).ravel()


def longest_first_to_least_loaded(
    costs: FloatArray, num_processes: int, *, window: int, rng: np.random.Generator
) -> IntArray:
    """Return an order of the batches in which the processes have similar costs in every `window` steps.

    Graham's longest-processing-time rule in each window: the most expensive batch first, each to the process with the
    lowest sum so far among those with a step left. The last window may be shorter.
    """
    order = rng.permutation(len(costs))
    in_windows = len(costs) // (window * num_processes) * window * num_processes
    parts = [
        _balanced(order[:in_windows].reshape(-1, window * num_processes), costs, num_processes, rng=rng),
        _balanced(order[in_windows:].reshape(1, -1), costs, num_processes, rng=rng),
    ]
    return np.concatenate(parts)


def _balanced(windows: IntArray, costs: FloatArray, num_processes: int, *, rng: np.random.Generator) -> IntArray:
    """Order the batches of each window, shape `(num_windows, steps · num_processes)`; return them flat."""
    num_windows, size = windows.shape
    if not windows.size:
        return windows.ravel()
    steps = size // num_processes
    by_cost = np.take_along_axis(windows, np.argsort(-costs[windows], axis=1, kind="stable"), axis=1)
    load = np.zeros((num_windows, num_processes))
    count = np.zeros((num_windows, num_processes), np.int64)
    dealt = np.empty((num_windows, steps, num_processes), np.int64)
    window = np.arange(num_windows)
    for position in range(size):
        process = np.where(count < steps, load, np.inf).argmin(axis=1)
        batch = by_cost[:, position]
        dealt[window, count[window, process], process] = batch
        load[window, process] += costs[batch]
        count[window, process] += 1
    return rng.permuted(dealt, axis=1).ravel()


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
