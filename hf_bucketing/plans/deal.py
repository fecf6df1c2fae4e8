"""Deal the rows of buckets into steps that all processes take together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from ..buckets.assignment import REJECTED_BUCKET
from .epoch import MIXED
from .rows import EpochRows, RepeatedRows, spread_repeats

Remainder = Literal["short", "drop", "repeat", "catch_all"]

CATCH_ALL = -4
"""Marks a catch-all step until the bucket of each of its batches is known; never in a finished plan."""


class Groups(NamedTuple):
    """Rows sorted by bucket: `counts[i]` rows of bucket `buckets[i]`, in the order of `buckets`."""

    rows: IntArray
    buckets: IntArray
    counts: IntArray

    @property
    def starts(self) -> IntArray:
        """Position of each bucket's first row."""
        return np.cumsum(self.counts) - self.counts


class Steps(NamedTuple):
    """Position of each step's first row, its samples per process and its bucket; all of shape `(num_steps,)`."""

    first: IntArray
    size: IntArray
    bucket: IntArray


class Deal(NamedTuple):
    """Steps over rows; `filled` counts repeated rows appended to complete a step."""

    rows: IntArray
    steps: Steps
    filled: int = 0


def group_rows(rows: IntArray, bucket_ids: IntArray, *, rng: np.random.Generator | None) -> Groups:
    """Sort rows by the buckets of the data set's rows and shuffle them within each; without a generator keep order."""
    unchanged = len(rows) == len(bucket_ids) and bool((np.diff(rows) == 1).all())
    ids = bucket_ids if unchanged else bucket_ids[rows]
    if len(ids) and ids.min() > REJECTED_BUCKET and ids.max() < 2**16:
        keys: npt.NDArray[Any] = ids.astype(np.uint16)
        present = np.bincount(ids)
        buckets = np.flatnonzero(present)
        counts = present[buckets]
    else:
        buckets, counts = np.unique(ids, return_counts=True)
        keys = np.searchsorted(buckets, ids)
        keys = keys.astype(np.uint16) if len(buckets) < 2**16 else keys
    del ids
    # numpy sorts 16-bit keys by radix
    order = np.argsort(keys, kind="stable")
    del keys
    groups = Groups(order if unchanged else rows[order], buckets.astype(np.int64), counts.astype(np.int64))
    if rng is not None:
        for start, count in zip(groups.starts.tolist(), groups.counts.tolist(), strict=True):
            rng.shuffle(groups.rows[start : start + count])
    return groups


def spread_groups(
    rows: IntArray,
    bucket_ids: IntArray,
    *,
    apart: Callable[[IntArray], IntArray | int],
    rng: np.random.Generator | None,
) -> Groups:
    """Sort rows, of which some occur several times, by their buckets, with the occurrences of each spread out.

    They lie `apart` places apart or more, a function of the buckets, in groups that are long enough.
    """
    repeated = RepeatedRows.of(rows, rng=rng)
    groups = group_rows(repeated.rows, bucket_ids, rng=None)
    times = repeated.times[groups.rows]
    del repeated
    spread = spread_repeats(groups.rows, times, groups.starts, apart=apart(groups.buckets), rng=rng)
    counts = np.add.reduceat(times, groups.starts, dtype=np.int64) if len(times) else groups.counts
    return Groups(spread.rows, groups.buckets, counts)


def deal(
    groups: Groups,
    sizes: IntArray,
    *,
    chosen: EpochRows,
    remainder: Remainder | Literal["join"],
    base_size: int | None = None,
    spare: Groups | None = None,
) -> Deal:
    """Deal the rows of `k` buckets into full steps, and their remainders as `BucketPlanConfig` describes.

    `sizes`, shape `(k,)`, and `base_size` are samples per process and step. The rows of `spare`, by default those of
    `groups`, complete the steps of `"repeat"`. `"join"` is for buckets that rise in length: see [`_join_neighbours`].
    """
    num_processes = chosen.num_processes
    per_step = sizes * num_processes
    full, left_over = groups.counts // per_step, groups.counts % per_step
    full_steps = Steps(
        np.repeat(groups.starts, full) + ranges(full) * np.repeat(per_step, full),
        np.repeat(sizes, full),
        np.repeat(groups.buckets, full),
    )
    first_left = groups.starts + full * per_step
    if remainder == "short":
        short, left, mixed = _short(groups, first_left, sizes, chosen)
        return _make_deal(groups.rows, full_steps, short, extra=(left, mixed))
    if remainder == "join":
        left, steps = _join_neighbours(groups, first_left, sizes, chosen)
        return _make_deal(groups.rows, full_steps, extra=(left, steps))
    if remainder == "repeat":
        spare = groups if spare is None else spare
        some = left_over > 0
        # A bucket of fewer rows than a batch makes smaller ones, so that no batch holds a row twice.
        size = np.minimum(sizes, spare.counts[np.searchsorted(spare.buckets, groups.buckets)])
        places = size * num_processes
        filled = _filled(groups, spare, first_left=first_left, per_step=places)
        steps = Steps((np.cumsum(places[some]) - places[some]), size[some], groups.buckets[some])
        return _make_deal(groups.rows, full_steps, extra=(filled, steps))._replace(
            filled=int((places - left_over)[some].sum())
        )
    if remainder == "catch_all":
        assert base_size is not None
        left, size = _spread(rows_from(groups, first_left), base_size, chosen)
        steps = Steps((np.cumsum(size) - size) * num_processes, size, np.full(len(size), CATCH_ALL))
        return _make_deal(groups.rows, full_steps, extra=(left, steps))
    return Deal(groups.rows, full_steps)


def ranges(counts: IntArray) -> IntArray:
    """Return 0 … c − 1 for each count c, concatenated: [2, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def spread_order(num_batches: int, size: int, *, num_short: int = 0, short_size: int = 0) -> IntArray:
    """Return the order that deals rows sorted by bucket to batches in turn, so that each batch mixes many buckets.

    Args:
        num_batches (`int`): Number of batches of `size` rows.
        size (`int`): Rows of a full batch, at least `short_size`.
        num_short (`int`): Number of batches of `short_size` rows, after the others.
        short_size (`int`): Rows of a short batch, at least 0.

    Example:
        >>> spread_order(2, 3, num_short=1, short_size=1)
        array([0, 3, 5, 1, 4, 6, 2])
    """
    slot = np.concatenate([np.tile(np.arange(size), num_batches), np.tile(np.arange(short_size), num_short)])
    order = np.empty(len(slot), np.int64)
    order[np.argsort(slot, kind="stable")] = np.arange(len(slot))
    return order


def rows_from(groups: Groups, first_left: IntArray) -> IntArray:
    """Return the rows of each bucket from `first_left` on."""
    count = groups.starts + groups.counts - first_left
    left: IntArray = groups.rows[np.repeat(first_left, count) + ranges(count)]
    return left


def _without_spare(left: IntArray, chosen: EpochRows) -> IntArray:
    """Return the rows without those, drawn at random, that do not divide evenly among the processes."""
    return np.delete(left, chosen.spare(len(left))) if len(left) % chosen.num_processes else left


def _short(groups: Groups, first_left: IntArray, sizes: IntArray, chosen: EpochRows) -> tuple[Steps, IntArray, Steps]:
    """Deal each remainder evenly in one smaller step; return those steps, the rows left of all, and their mixed steps.

    Buckets of one batch size, and neighbours among them, cost alike: no process of a mixed step waits long.
    """
    num_processes = chosen.num_processes
    size, rest = np.divmod(groups.starts + groups.counts - first_left, num_processes)
    some = size > 0
    short = Steps(first_left[some], size[some], groups.buckets[some])
    left = rows_from(groups, first_left + size * num_processes)
    left = _without_spare(left[np.argsort(np.repeat(sizes, rest), kind="stable")], chosen)
    count = len(left) // num_processes
    mixed = Steps(np.arange(count) * num_processes, np.ones(count, np.int64), np.full(count, MIXED))
    return short, left, mixed


def _filled(groups: Groups, spare: Groups, *, first_left: IntArray, per_step: IntArray) -> IntArray:
    """Return a full step for each bucket with a remainder: the remainder, then spare rows of the bucket."""
    left_over = groups.starts + groups.counts - first_left
    some = left_over > 0
    at = np.searchsorted(spare.buckets, groups.buckets[some])
    first, filled_count, start, count = (
        np.repeat(column, per_step[some])
        for column in (first_left[some], left_over[some], spare.starts[at], spare.counts[at])
    )
    place = ranges(per_step[some])
    filling = place >= filled_count
    filled = np.empty(len(place), np.int64)
    filled[~filling] = groups.rows[(first + place)[~filling]]
    filled[filling] = spare.rows[(start + (place - filled_count) % count)[filling]]
    return filled


def _spread(left: IntArray, size: int, chosen: EpochRows) -> tuple[IntArray, IntArray]:
    """Deal the remainders of all buckets into steps of `size` and one smaller step; return the rows and the sizes."""
    num_processes = chosen.num_processes
    left = _without_spare(left, chosen)
    full, short = divmod(len(left) // num_processes, size)
    order = spread_order(full * num_processes, size, num_short=num_processes if short else 0, short_size=short)
    return left[order], np.array([size] * full + [short] * (short > 0), np.int64)


def _join_neighbours(
    groups: Groups, first_left: IntArray, sizes: IntArray, chosen: EpochRows
) -> tuple[IntArray, Steps]:
    """Deal the remainders into steps of neighbouring buckets, from the last bucket down; only the last may be smaller.

    The first bucket of a step fixes its size, so that samples of the buckets before it, which are shorter, fit too.
    """
    left = rows_from(groups, first_left)
    count = groups.starts + groups.counts - first_left
    at = np.repeat(np.arange(len(groups.buckets)), count)
    order = np.argsort(-at, kind="stable")
    if len(left) % chosen.num_processes:
        order = np.delete(order, chosen.spare(len(left)))
    left, at = left[order], at[order]
    first, size, bucket = [], [], []
    position = 0
    while position < len(left):
        most = min(int(sizes[at[position]]), (len(left) - position) // chosen.num_processes)
        stop = position + most * chosen.num_processes
        first.append(position)
        size.append(most)
        bucket.append(int(groups.buckets[at[position]]) if at[position] == at[stop - 1] else MIXED)
        position = stop
    return left, Steps(*(np.array(column, np.int64) for column in (first, size, bucket)))


def _make_deal(rows: IntArray, *parts: Steps, extra: tuple[IntArray, Steps]) -> Deal:
    """Join all steps; those of `extra` refer to rows of their own, which are appended."""
    more, steps = extra
    parts = (*parts, steps._replace(first=steps.first + len(rows)))
    return Deal(np.concatenate([rows, more]), Steps(*(np.concatenate(column) for column in zip(*parts, strict=True))))
