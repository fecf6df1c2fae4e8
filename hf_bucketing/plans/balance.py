"""Group batches of similar cost into one step, so that no process waits."""

from __future__ import annotations

import heapq

import numpy as np

from ..buckets.arrays import FloatArray, IntArray
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
