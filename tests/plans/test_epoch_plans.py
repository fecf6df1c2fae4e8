"""Epoch plans: partition, equal steps, lockstep, and the counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hf_bucketing import BucketingError, PlanError
from hf_bucketing.plans import (
    MIXED,
    BucketPlanConfig,
    EpochPlan,
    LengthPlanConfig,
    PackPlanConfig,
    plan_buckets,
    plan_lengths,
    plan_packs,
)

processes = st.integers(1, 5)
bucket_columns = st.lists(st.integers(-1, 6), min_size=5, max_size=200).filter(
    lambda ids: sum(bucket >= 0 for bucket in ids) >= 5
)


def assert_partition(plan: EpochPlan, usable: set[int], num_rows: int) -> None:
    """Every usable row is in the plan once, but for fewer than num_processes; all rows are accounted for."""
    assert len(set(plan.indices.tolist())) == len(plan.indices) == plan.kept
    assert set(plan.indices.tolist()) <= usable
    assert plan.repeated == 0
    assert plan.drop_reasons.get("rejected", 0) == num_rows - len(usable)
    assert plan.drop_reasons.get("remainder", 0) == len(usable) - plan.kept
    assert plan.kept + plan.dropped == num_rows
    shares = [list(plan.batches(process_index=process)) for process in range(plan.num_processes)]
    assert {len(share) for share in shares} == {plan.num_steps}
    assert all(len(batch) for share in shares for batch in share)
    assert sorted(i for share in shares for batch in share for i in batch) == sorted(plan.indices)


@given(bucket_columns, processes, st.integers(1, 6), st.integers(0, 3))
def test_bucket_plans_deal_every_sample_once_in_lockstep(ids, num_processes: int, batch_size: int, epoch: int) -> None:
    column = np.array(ids)
    config = BucketPlanConfig(batch_size=batch_size, seed=3)
    plan = plan_buckets(column, config, epoch=epoch, num_processes=num_processes)
    usable = set(np.flatnonzero(column >= 0).tolist())
    assert_partition(plan, usable, len(column))
    assert plan.drop_reasons.get("remainder", 0) < num_processes
    mixed = 0
    for step in range(plan.num_steps):
        batches = [plan.batch(step * num_processes + process) for process in range(num_processes)]
        buckets = [set(column[batch].tolist()) for batch in batches]
        assert all(len(bucket) == 1 for bucket in buckets), "a batch must be stackable"
        if plan.bucket_ids[step * num_processes] == MIXED:
            mixed += 1
            assert all(len(batch) == 1 for batch in batches)
        else:
            assert set.union(*buckets) == {plan.bucket_ids[step * num_processes]}
            assert len({len(batch) for batch in batches}) == 1
            assert len(batches[0]) <= batch_size
    assert mixed == plan.num_mixed_steps
    # No more steps than full ones, one short one per bucket, and the mixed ones.
    full = sum(count // (batch_size * num_processes) for count in Counter(column[column >= 0].tolist()).values())
    assert plan.num_steps <= full + len(set(column[column >= 0])) + mixed


@given(bucket_columns, processes, st.integers(1, 6))
def test_remainder_drop_leaves_out_exactly_what_fills_no_step(ids, num_processes: int, batch_size: int) -> None:
    column = np.array(ids)
    per_step = batch_size * num_processes
    full = sum(count // per_step for count in Counter(column[column >= 0].tolist()).values())
    config = BucketPlanConfig(batch_size=batch_size, remainder="drop")
    if not full:
        with pytest.raises(PlanError, match="`remainder="):
            plan_buckets(column, config, epoch=0, num_processes=num_processes)
        return
    plan = plan_buckets(column, config, epoch=0, num_processes=num_processes)
    assert plan.num_steps == full
    assert plan.kept == full * per_step
    assert plan.num_mixed_steps == 0


def test_a_batch_size_per_bucket_is_kept() -> None:
    column = np.repeat([0, 1], 24)
    plan = plan_buckets(column, BucketPlanConfig(batch_size={0: 3, 1: 4}), epoch=0, num_processes=2)
    sizes = {bucket: set() for bucket in (0, 1)}
    for position, bucket in enumerate(plan.bucket_ids.tolist()):
        sizes[bucket].add(len(plan.batch(position)))
    assert sizes == {0: {3}, 1: {4}}
    with pytest.raises(PlanError, match=r"no size for buckets \[1\]"):
        plan_buckets(column, BucketPlanConfig(batch_size={0: 3}), epoch=0, num_processes=2)


def test_first_fit_fills_packs_better_than_taking_samples_in_order() -> None:
    tokens = np.random.default_rng(0).integers(50, 2000, 4000)
    plan = plan_packs(tokens, PackPlanConfig(max_tokens=8192, strip_length=1), epoch=0, num_processes=1)
    one_open = plan_packs(
        tokens, PackPlanConfig(max_tokens=8192, strip_length=1, open_packs=1), epoch=0, num_processes=1
    )
    fill, in_order = (tokens.sum() / (p.num_batches * 8192) for p in (plan, one_open))
    assert fill > 0.98
    assert in_order < fill - 0.05


def test_a_row_above_the_capacity_is_named() -> None:
    with pytest.raises(PlanError, match=r"Row 1 takes 104 tokens, in strips of 8, and exceeds `max_tokens=100`"):
        plan_packs([50, 99, 60], PackPlanConfig(max_tokens=100, strip_length=8), epoch=0, num_processes=1)


MAKERS = {
    "buckets": lambda seed, epoch, n: plan_buckets(
        np.arange(200) % 7, BucketPlanConfig(batch_size=3, seed=seed), epoch=epoch, num_processes=n
    ),
    "packs": lambda seed, epoch, n: plan_packs(
        1 + np.arange(200) % 37,
        PackPlanConfig(max_tokens=100, strip_length=1, seed=seed),
        epoch=epoch,
        num_processes=n,
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_plan_depends_on_seed_and_epoch_alone(make) -> None:
    first = make(0, 0, 2)
    assert np.array_equal(first.indices, make(0, 0, 2).indices)
    assert np.array_equal(first.offsets, make(0, 0, 2).offsets)
    for other in (make(1, 0, 2), make(0, 1, 2), make(1, 1, 2)):
        assert not np.array_equal(first.indices, other.indices)
    with pytest.raises(BucketingError, match="must be whole numbers from 0"):
        make(0, -1, 2)
    with pytest.raises(PlanError, match="num_processes"):
        make(0, 0, 0)


def test_other_samples_are_left_out_in_other_epochs() -> None:
    left_out = [frozenset(range(200)) - set(MAKERS["buckets"](0, epoch, 3).indices.tolist()) for epoch in range(20)]
    assert {len(rows) for rows in left_out} == {2}
    assert len(set(left_out)) > 10


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_plan_can_be_entered_at_any_step(make) -> None:
    plan = make(0, 0, 2)
    for process in (None, 0, 1):
        whole = [batch.tolist() for batch in plan.batches(process_index=process)]
        per_step = 2 if process is None else 1
        for step in range(plan.num_steps + 1):
            rest = plan.batches(process_index=process, first_step=step)
            assert [batch.tolist() for batch in rest] == whole[step * per_step :]
    counts = [sum(map(len, list(plan.batches())[2 * s : 2 * s + 2])) for s in range(plan.num_steps)]
    assert plan.samples_in_steps(1, 3) == sum(counts[1:3])
    assert plan.samples_in_steps(plan.num_steps - 1, plan.num_steps + 5) == counts[-1]
    assert plan.summary()["kept"] == sum(counts)


def buckets(ids, *, num_processes: int = 1, **config):
    return plan_buckets(ids, BucketPlanConfig(**{"batch_size": 1, **config}), epoch=0, num_processes=num_processes)


def weighted(plan, config, *, weights=(2, 2, 0)):
    return plan([1, 1, 1], config, epoch=0, num_processes=5, weights=weights)


def epoch_plan(stop: int, *, num_processes: int):
    return EpochPlan(
        indices=np.arange(3), offsets=np.array([0, stop]), bucket_ids=np.zeros(1), num_processes=num_processes
    )


@pytest.mark.parametrize(("make", "message"), [
    (lambda: buckets([-1, -1]), "every row was rejected"),
    (lambda: buckets([]), "data set is empty"),
    (lambda: buckets([0], num_processes=2), "do not fill one step"),
    (lambda: buckets([0], batch_size=0), "at least 1"),
    (lambda: buckets([0], remainder="cut"), '`remainder` must be one of "short", "drop"'),
    (lambda: plan_packs([0, 5], PackPlanConfig(max_tokens=64), epoch=0, num_processes=2), "1 of 2 rows have tokens"),
    (lambda: weighted(plan_lengths, LengthPlanConfig(batch_size=1)),
     "^2 of 3 rows have a length, which occur 4 times in this epoch, fewer than the 5 processes .1 more do not occur"),
    (lambda: weighted(plan_packs, PackPlanConfig(max_tokens=64)), "^2 of 3 rows have tokens, which occur 4 times"),
    (lambda: weighted(plan_buckets, BucketPlanConfig(batch_size=1)), "^4 occurrences of 2 usable rows do not fill"),
    (lambda: weighted(plan_buckets, BucketPlanConfig(batch_size=1), weights=[0, 0, 0]), "No row .* by `weights`"),
    (lambda: PackPlanConfig(max_tokens=0), "`max_tokens` must be at least 1"),
    (lambda: PackPlanConfig(max_tokens=9, strategy="magic"), "first_fit"),
    (lambda: epoch_plan(3, num_processes=2), "evenly"),
    (lambda: epoch_plan(2, num_processes=1), "do not fit"),
])  # fmt: skip
def test_impossible_plans_are_errors_that_say_why(make, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()
