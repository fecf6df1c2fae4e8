"""Length plans: batches that keep to their limits, buckets and boundaries, remainders, oversize samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hf_bucketing import PlanError
from hf_bucketing.plans import MIXED, EpochPlan, LengthPlanConfig, length_buckets, plan_lengths

columns = st.lists(st.floats(0.5, 20), min_size=5, max_size=120)
processes = st.integers(1, 5)
strategies = st.sampled_from(["bucket", "random", "sorted"])


def plan_of(lengths, *, num_processes: int = 1, epoch: int = 0, **config) -> EpochPlan:
    return plan_lengths(lengths, LengthPlanConfig(**config), epoch=epoch, num_processes=num_processes)


def padding(plan: EpochPlan, lengths) -> float:
    return plan.summary(num_tokens=lengths)["padding"]


@given(
    columns,
    processes,
    strategies,
    st.integers(1, 6),
    st.sampled_from(["quantile", "uniform", (2, 9.5)]),
    st.sampled_from([None, 1, 5]),
)
def test_a_batch_times_its_longest_fits_the_limit_and_holds_at_most_max_samples(
    lengths, num_processes, strategy, num_buckets, boundaries, max_samples
):
    column = np.array(lengths)
    config = {"strategy": strategy, "num_buckets": num_buckets, "boundaries": boundaries, "max_tokens": 41.0}
    config["max_samples"] = max_samples
    plan = plan_of(column, num_processes=num_processes, **config)
    assert plan.kept == len(column) - plan.drop_reasons.get("remainder", 0) > len(column) - num_processes
    for batch in plan.batches():
        assert len(batch) * column[batch].max() <= 41
        assert max_samples is None or len(batch) <= max_samples
    if strategy == "bucket":
        bounds = length_buckets(column, LengthPlanConfig(**config))
        assert np.all(np.diff(bounds) > 0)
        assert bounds[-1] >= column.max()
        for batch, bucket in zip(plan.batches(), plan.bucket_ids.tolist(), strict=True):
            assert bucket == MIXED or {*np.searchsorted(bounds, column[batch]).tolist()} == {bucket}
            assert bucket == MIXED or len(batch) * bounds[bucket] <= 41, "also when padded to the bucket's bound"


@given(columns, processes, strategies, st.integers(1, 7))
def test_remainder_drop_leaves_full_batches_alone(lengths, num_processes: int, strategy: str, batch_size: int) -> None:
    config = {"strategy": strategy, "batch_size": batch_size, "num_buckets": 1, "remainder": "drop"}
    steps = len(lengths) // (batch_size * num_processes)
    if not steps:
        with pytest.raises(PlanError, match="do not fill one step"):
            plan_of(lengths, num_processes=num_processes, **config)
        return
    plan = plan_of(lengths, num_processes=num_processes, **config)
    assert plan.num_steps == steps
    assert {len(batch) for batch in plan.batches()} == {batch_size}
    assert plan.drop_reasons.get("remainder", 0) == len(lengths) - steps * batch_size * num_processes


def test_buckets_and_sorting_save_padding() -> None:
    lengths = np.exp(np.random.default_rng(0).normal(1.8, 0.8, 5000)).clip(1, 30)
    by_strategy = {
        name: padding(plan_of(lengths, max_tokens=60, strategy=name, num_buckets=30), lengths)
        for name in ("random", "bucket", "sorted")
    }
    assert by_strategy["random"] > 0.3
    assert by_strategy["bucket"] < 0.05
    assert by_strategy["sorted"] < 0.002
    few = plan_of(lengths, max_tokens=60, num_buckets=3)
    assert padding(few, lengths) > 2 * by_strategy["bucket"]


def test_boundaries_are_quantiles_even_widths_or_given() -> None:
    lengths = np.array([1, 1, 2, 3, 4, 5, 9, 21])
    bounds = {name: LengthPlanConfig(batch_size=1, num_buckets=4, boundaries=name) for name in ("quantile", "uniform")}
    assert length_buckets(lengths, bounds["quantile"]).tolist() == [1, 3, 5, 21]
    assert length_buckets(lengths, bounds["uniform"]).tolist() == [6, 11, 16, 21]
    assert length_buckets(lengths, LengthPlanConfig(batch_size=1, boundaries=[2, 8.5])).tolist() == [2, 8, 21]
    assert length_buckets(lengths, LengthPlanConfig(batch_size=1, boundaries=(2, 30))).tolist() == [2, 30]
    assert length_buckets(lengths, LengthPlanConfig(max_tokens=25, boundaries=(2, 30))).tolist() == [2, 25]
    assert length_buckets(lengths / 2, LengthPlanConfig(max_tokens=25, boundaries=(-1, 2.3))).tolist() == [2.3, 10.5]


def test_sorted_batches_hold_neighbours_and_mix_equal_lengths() -> None:
    lengths = np.repeat([3, 5, 4], 40)
    first, second = (plan_of(lengths, strategy="sorted", batch_size=8, epoch=epoch) for epoch in (0, 1))
    assert all(len({*lengths[batch].tolist()}) == 1 for batch in first.batches())
    assert {frozenset(batch.tolist()) for batch in first.batches()} != {
        frozenset(batch.tolist()) for batch in second.batches()
    }
    assert [lengths[batch[0]] for batch in first.batches()] != sorted(lengths[batch[0]] for batch in first.batches())


@pytest.mark.parametrize(("strategy", "wanted"), [
    ("random", [[0, 1], [2, 3], [4, 5], [6]]),
    ("sorted", [[1, 4], [2, 5], [6, 0], [3]]),
    ("bucket", [[1, 2], [4, 5], [6], [0, 3]]),
])  # fmt: skip
def test_without_shuffle_batches_stay_in_order(strategy: str, wanted) -> None:
    lengths = [7, 1, 2, 9, 1, 2, 2]
    for epoch in (0, 1):
        plan = plan_of(lengths, strategy=strategy, batch_size=2, boundaries=(5,), shuffle=False, epoch=epoch)
        assert [batch.tolist() for batch in plan.batches()] == wanted


@pytest.mark.parametrize("strategy", ["bucket", "random", "sorted"])
def test_oversize_samples_are_errors_batches_of_their_own_or_counted(strategy: str) -> None:
    lengths = [4, 30, 5, 3, 0, 21, 4, 4]
    with pytest.raises(PlanError, match=r"Row 1 is 30 long and exceeds `max_tokens=20` \(2 of 8 rows do\)"):
        plan_of(lengths, max_tokens=20, strategy=strategy)
    own = plan_of(lengths, max_tokens=20, strategy=strategy, oversize="own_batch")
    assert own.kept == 7
    assert {tuple(batch.tolist()) for batch in own.batches() if {1, 5} & {*batch.tolist()}} == {(1,), (5,)}
    dropped = plan_of(lengths, max_tokens=20, strategy=strategy, oversize="drop")
    assert sorted(dropped.indices.tolist()) == [0, 2, 3, 6, 7]
    assert dict(dropped.drop_reasons) == {"rejected": 1, "oversize": 2}
    assert length_buckets(lengths, LengthPlanConfig(max_tokens=20, oversize="own_batch", num_buckets=1)).tolist() == [
        5,
        30,
    ]


@pytest.mark.parametrize(("config", "message"), [
    ({}, "either `batch_size` or `max_tokens`"),
    ({"batch_size": 1, "max_tokens": 3}, "either `batch_size` or `max_tokens`"),
    ({"batch_size": 0}, "at least 1"),
    ({"max_tokens": 0}, "above 0"),
    ({"batch_size": 1, "max_samples": 2}, "`max_samples` goes with `max_tokens`"),
    ({"batch_size": 1, "remainder": "repeat"}, "is for buckets of sizes"),
    ({"batch_size": 1, "remainder": "cut"}, '`remainder` must be one of "short", "drop"'),
    ({"batch_size": 1, "strategy": "long"}, '`strategy` must be one of "bucket", "random", "sorted"'),
    ({"batch_size": 1, "oversize": "keep"}, '`oversize` must be one of "error", "own_batch", "drop"'),
    ({"batch_size": 1, "boundaries": "even"}, '"quantile", "uniform" or numbers'),
    ({"batch_size": 1, "boundaries": [3, 3]}, "rise"),
    ({"batch_size": 1, "num_processes": 5}, "4 of 5 rows have a length"),
])  # fmt: skip
def test_impossible_length_plans_are_errors(config, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of([1, 2, 3, 0, 4], **config)
