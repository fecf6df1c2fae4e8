"""Boundaries of length buckets: fitted ones waste least, and remainders join their neighbours."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hf_bucketing.plans import MIXED, EpochPlan, LengthPlanConfig, length_buckets, plan_lengths
from hf_bucketing.plans.lengths import batch_sizes, fitted_bounds


def plan_of(lengths, *, num_processes: int = 1, **config) -> EpochPlan:
    return plan_lengths(lengths, LengthPlanConfig(**config), epoch=0, num_processes=num_processes)


def padding(plan: EpochPlan, lengths) -> float:
    return plan.summary(num_tokens=lengths)["padding"]


def waste(lengths, bounds, max_tokens: float | None) -> float:
    bounds = np.array(bounds, float)
    each = bounds.copy()
    if max_tokens is not None:
        each += max_tokens / batch_sizes(bounds, max_tokens=max_tokens, max_samples=None)
    return float(each[np.searchsorted(bounds, lengths)].sum())


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 4), st.sampled_from([None, 9.0, 12.5, 24.0])
)
def test_no_other_boundaries_waste_less_than_fitted_ones(lengths, num_buckets: int, max_tokens) -> None:
    column, different = np.array(lengths), sorted({*lengths})
    bounds = fitted_bounds(column, num_buckets, max_tokens=max_tokens, max_samples=None)
    count = min(num_buckets, len(different))
    ways = [waste(column, (*inner, different[-1]), max_tokens) for inner in combinations(different[:-1], count - 1)]
    assert len(bounds) == count
    assert waste(column, bounds, max_tokens) == pytest.approx(min(ways))


@pytest.mark.parametrize("num_processes", [1, 2, 8])
def test_batches_of_16_pad_less_than_those_of_a_sampler_that_sorts_50_batches(num_processes: int) -> None:
    lengths = np.random.default_rng(0).random(40_000) + 0.001
    plan = plan_of(lengths, batch_size=16, num_processes=num_processes)
    order = np.random.default_rng(0).permutation(40_000).reshape(-1, 50 * 16)
    sorted_in_windows = np.sort(lengths[order], axis=1).reshape(-1, 16)
    assert padding(plan, lengths) < 1 - lengths.sum() / (16 * sorted_in_windows.max(axis=1).sum()) < 0.02


def test_fitted_boundaries_fill_and_pad_better_than_quantiles() -> None:
    lengths = np.exp(np.random.default_rng(0).normal(1.8, 0.8, 20_000))
    lengths = lengths[(lengths > 1) & (lengths < 29)]
    fitted, quantile = (
        plan_of(lengths, max_tokens=60, num_buckets=30, boundaries=name) for name in ("fitted", "quantile")
    )
    most = plan_of(lengths, max_tokens=60, strategy="sorted")
    assert fitted.num_batches < 1.01 * most.num_batches < 0.97 * quantile.num_batches
    assert padding(fitted, lengths) < padding(quantile, lengths)


def test_the_size_of_a_batch_of_tiny_lengths_does_not_overflow() -> None:
    plan = plan_of([1e-300] * 6 + [0.5, 1.0], max_tokens=1, num_buckets=2, num_processes=2)
    assert sorted(np.diff(plan.offsets).tolist()) == [1, 1, 3, 3]


def test_a_small_data_set_gets_few_buckets() -> None:
    lengths = np.arange(1, 10_001) / 100
    counts = {rows: len(length_buckets(lengths[:rows], LengthPlanConfig(batch_size=10))) for rows in (30, 400, 10_000)}
    assert counts == {30: 1, 400: 10, 10_000: 50}
    assert len(length_buckets(lengths, LengthPlanConfig(batch_size=10, num_buckets=200))) == 200


@given(st.lists(st.integers(1, 20), min_size=8, max_size=100), st.integers(1, 4), st.booleans())
def test_remainders_join_neighbours_in_full_steps(lengths, num_processes: int, shuffle: bool) -> None:
    plan = plan_of(lengths, batch_size=3, num_buckets=4, num_processes=num_processes, shuffle=shuffle)
    sizes = np.diff(plan.offsets).reshape(-1, num_processes)
    assert (sizes == sizes[:, :1]).all(), "all processes take as many samples"
    assert plan.num_steps == -(-(len(lengths) // num_processes) // 3), "as few steps as without buckets"
    assert np.count_nonzero(sizes[:, 0] < 3) <= 1
    bounds = length_buckets(lengths, LengthPlanConfig(batch_size=3, num_buckets=4))
    buckets = np.searchsorted(bounds, np.array(lengths)[plan.indices]).reshape(-1)
    mixed = np.repeat(plan.bucket_ids == MIXED, np.diff(plan.offsets))
    assert (buckets[~mixed] == np.repeat(plan.bucket_ids, np.diff(plan.offsets))[~mixed]).all()
