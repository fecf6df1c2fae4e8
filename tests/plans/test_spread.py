"""Repeats are spread as sorting whole numbers would do, in linear time, and in no more memory than a plain plan."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from hf_bucketing.plans import BucketPlanConfig, plan_buckets
from hf_bucketing.plans.deal import spread_groups
from hf_bucketing.plans.rows import _stride, stable_order


def test_keys_are_sorted_as_by_a_stable_sort() -> None:
    rng = np.random.default_rng(0)
    for largest, kind in ((5, np.uint16), (2**20, np.uint32), (2**63, np.uint64), (1, np.uint32)):
        keys = rng.integers(0, largest, 3000).astype(kind)
        keys[::7] = keys[0]
        assert stable_order(keys).tolist() == np.argsort(keys, kind="stable").tolist()
    fractions = rng.integers(0, 40, 3000) / 40
    assert stable_order(fractions.view(np.uint64)).tolist() == np.argsort(fractions, kind="stable").tolist()
    assert stable_order(np.zeros(0, np.uint32)).tolist() == []


def spread_by_sorting(rows: np.ndarray, ids: np.ndarray, *, apart: int, rng: np.random.Generator | None) -> np.ndarray:
    """Order rows by one number for each, as `spread_repeats` describes it."""
    rows = rows[np.argsort(ids[rows], kind="stable")]
    _, group, counts = np.unique(ids[rows], return_inverse=True, return_counts=True)
    end = rows.max() + 1
    rank = rows if rng is None else rng.permutation(end)[rows]
    order = np.lexsort((rank, group))
    rows, rank, starts = rows[order], rank[order], np.cumsum(counts) - counts
    turns = np.array([np.unique(rank[group == number], return_counts=True)[1].max() for number in range(len(counts))])
    length = counts // turns
    part = np.maximum((length - apart) // 2, 1)
    place = np.arange(len(rows)) - starts[group]
    turn = place * np.array([_stride(int(number)) for number in turns])[group] % turns[group]
    last = np.arange(len(rows)) if rng is None else rng.permutation(len(rows))
    order = last[np.lexsort((place[last] // turns[group[last]] // part[group[last]], turn[last], group[last]))]
    return rows[order]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "buckets", "most", "apart"), [(400, 5, 6, 8), (60, 30, 3, 1), (70_000, 2, 3, 40_000), (1, 1, 9, 2)]
)
def test_repeats_are_spread_as_one_sort_would_do(
    num_rows: int, buckets: int, most: int, apart: int, shuffle: bool
) -> None:
    rng = np.random.default_rng(num_rows)
    ids = rng.integers(0, buckets, num_rows) * 3
    rows = np.repeat(np.arange(num_rows), rng.integers(1, most + 1, num_rows))
    seeds = [np.random.default_rng(1) if shuffle else None for _ in range(2)]
    groups = spread_groups(rows, ids, apart=lambda _: apart, rng=seeds[0])
    assert groups.rows.tolist() == spread_by_sorting(rows, ids, apart=apart, rng=seeds[1]).tolist()
    assert groups.counts.sum() == len(rows)


def test_a_weighted_plan_needs_little_more_memory_than_a_plain_one() -> None:
    ids = np.arange(400_000) % 19
    peaks = []
    for weights in (None, np.where(np.arange(len(ids)) % 3, 0.5, 2.0)):
        tracemalloc.start()
        plan = plan_buckets(ids, BucketPlanConfig(batch_size=8), epoch=0, num_processes=1, weights=weights)
        peaks.append(tracemalloc.get_traced_memory()[1] / len(plan.indices))
        tracemalloc.stop()
    assert peaks[1] < 1.25 * peaks[0]
