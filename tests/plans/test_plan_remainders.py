"""Bucket plans: what becomes of remainders, plans without lockstep, and the weighted draw as one permutation."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hf_bucketing import PlanError
from hf_bucketing.plans import BucketPlanConfig, EpochPlan, plan_buckets

columns = st.lists(st.integers(-1, 5), min_size=1, max_size=150).filter(lambda ids: max(ids) >= 0)
processes = st.integers(1, 5)
sizes = st.integers(1, 6)


def plan_of(ids, *, num_processes: int = 1, epoch: int = 0, **config) -> EpochPlan:
    return plan_buckets(ids, BucketPlanConfig(**config), epoch=epoch, num_processes=num_processes)


def label(column, batch, base: int) -> int:
    """The bucket that a collator gives a batch."""
    buckets = set(column[batch].tolist())
    return buckets.pop() if len(buckets) == 1 else base


@given(columns, processes, sizes)
def test_repeat_completes_steps_with_samples_of_their_bucket_each_once_per_batch(
    ids, num_processes: int, batch_size: int
) -> None:
    column = np.array(ids)
    plan = plan_of(column, batch_size=batch_size, remainder="repeat", num_processes=num_processes)
    counts = Counter(column[column >= 0].tolist())
    per_step = batch_size * num_processes
    assert plan.kept == sum(counts.values())
    assert plan.num_steps == sum(-(-count // per_step) for count in counts.values())
    places = {b: num_processes * min(batch_size, count) for b, count in counts.items()}
    assert plan.repeated == sum(-count % per_step if count >= batch_size else places[b] - count
                                for b, count in counts.items())  # fmt: skip
    assert "remainder" not in plan.drop_reasons
    for position, batch in enumerate(plan.batches()):
        assert set(column[batch].tolist()) == {plan.bucket_ids[position]}
        assert len(batch) == len(set(batch.tolist())) == min(batch_size, counts[plan.bucket_ids[position]])


def test_repeat_draws_a_bucket_of_one_row_once_per_process() -> None:
    plan = plan_of([0, *[1] * 512], batch_size=32, remainder="repeat", num_processes=8)
    assert (plan.num_steps, plan.kept, plan.repeated) == (3, 513, 7)


def test_repeat_fills_the_rest_of_an_epoch_with_samples_seen_before() -> None:
    column = np.repeat([0, 1], 10)
    seen = np.array([*range(9), *range(10, 18)])
    config = BucketPlanConfig(batch_size=4, remainder="repeat")
    plan = plan_buckets(column, config, epoch=0, num_processes=2, consumed=seen)
    assert (plan.num_steps, plan.consumed, plan.drop_reasons) == (2, 17, {})
    for step in (plan.indices[:8], plan.indices[8:]):
        assert len(set(step.tolist())) == 8
        assert len({*column[step].tolist()}) == 1
    assert {9, 18, 19} <= set(plan.indices.tolist())
    assert (plan.kept, plan.repeated) == (3, 13)


@given(columns, processes, sizes)
def test_catch_all_puts_remainders_into_batches_of_the_base_bucket(ids, num_processes: int, batch_size: int) -> None:
    column = np.array(ids)
    counts = Counter(column[column >= 0].tolist())
    per_step = batch_size * num_processes
    if sum(counts.values()) < num_processes:
        return
    plan = plan_of(column, batch_size=batch_size, remainder="catch_all", base=1, num_processes=num_processes)
    assert plan.drop_reasons.get("remainder", 0) == sum(counts.values()) % num_processes
    assert plan.repeated == 0
    caught = 0
    for step in range(plan.num_steps):
        batches = [plan.batch(step * num_processes + process) for process in range(num_processes)]
        assert len({len(batch) for batch in batches}) == 1
        labels = plan.bucket_ids[step * num_processes : (step + 1) * num_processes].tolist()
        assert labels == [label(column, batch, 1) for batch in batches]
        caught += len({*column[np.concatenate(batches)].tolist()}) > 1
    left = sum(count % per_step for count in counts.values())
    assert caught <= -(-left // per_step)


def test_mixed_steps_hold_samples_of_like_batch_sizes() -> None:
    """Equal limits make batch sizes fall with the cost of a sample, and the slowest process decides over a step."""
    column, sizes = np.repeat([0, 1, 2, 3], 3), {0: 1, 1: 8, 2: 1, 3: 8}
    for epoch in range(5):
        plan = plan_of(column, batch_size=sizes, num_processes=2, epoch=epoch)
        steps = column[plan.indices].reshape(-1, 2).tolist()
        assert sorted(sorted(step) for step in steps if step[0] != step[1]) == [[0, 2], [1, 3]]


def test_catch_all_batches_hold_as_many_buckets_as_they_can() -> None:
    column = np.repeat([0, 1, 2, 3], 15)
    plan = plan_of(column, batch_size=4, remainder="catch_all", base=2, num_processes=2)
    mixed = [batch for batch in plan.batches() if len({*column[batch].tolist()}) > 1]
    assert sorted(len(batch) for batch in mixed) == [2] * 2 + [4] * 6
    assert plan.num_mixed_steps == 0, "all their batches have the base bucket's size"


@given(columns, processes, sizes, st.integers(0, 3))
def test_without_lockstep_each_process_draws_from_its_own_share(ids, num_processes, batch_size, epoch) -> None:
    column = np.array(ids)
    usable = np.count_nonzero(column >= 0)
    options = {"batch_size": batch_size, "remainder": "catch_all", "base": 2, "lockstep": False}
    if usable < batch_size * num_processes:
        with pytest.raises(PlanError, match="do not fill one step"):
            plan_of(column, num_processes=num_processes, epoch=epoch, **options)
        return
    plan = plan_of(column, num_processes=num_processes, epoch=epoch, **options)
    assert plan.num_steps == usable // (batch_size * num_processes)
    assert plan.kept == plan.num_steps * batch_size * num_processes == len(set(plan.indices.tolist()))
    for process in range(num_processes):
        share = list(plan.batches(process_index=process))
        assert {len(batch) for batch in share} == {batch_size}
        assert [label(column, batch, 2) for batch in share] == plan.bucket_ids[process::num_processes].tolist()
        whole = Counter(int(column[batch[0]]) for batch in share if len({*column[batch].tolist()}) == 1)
        held = Counter(column[np.concatenate(share)].tolist())
        assert all(whole[bucket] >= count // batch_size for bucket, count in held.items())
    by_step = plan.bucket_ids.reshape(-1, num_processes)
    assert plan.num_mixed_steps == sum(len(set(step)) > 1 for step in by_step.tolist())


def draw_by_draw(batches: dict[int, int], rng: np.random.Generator) -> tuple[int, ...]:
    """Draw buckets one after the other, each weighted by the batches that it has left."""
    left = dict(batches)
    drawn = []
    while any(left.values()):
        weights = np.array([*left.values()], float)
        bucket = int(rng.choice([*left], p=weights / weights.sum()))
        left[bucket] -= 1
        drawn.append(bucket)
    return tuple(drawn)


def novelai_epoch(ids: list[int], size: int, num_processes: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Plan process 0's epoch step by step, as the README of NovelAI's bucketing tells; bucket 0 is the base."""
    rows = rng.permutation(len(ids))
    rows = rows[: len(rows) // (size * num_processes) * size * num_processes][::num_processes]
    held = Counter(ids[row] for row in rows)
    batches = {bucket: count // size for bucket, count in held.items()}
    batches[-1] = sum(count % size for count in held.values()) // size
    return tuple(max(bucket, 0) for bucket in draw_by_draw(batches, rng))


def chi_squared(first: Counter, second: Counter) -> float:
    """Pearson's statistic of two samples of equal size."""
    cells = first.keys() | second.keys()
    return sum((first[cell] - second[cell]) ** 2 / (first[cell] + second[cell]) for cell in cells)


def test_the_order_of_steps_has_the_distribution_of_a_weighted_draw() -> None:
    # 6! / (3! 2! 1!) = 60 sequences; the 99.9 % quantile of chi-squared with 59 degrees of freedom is 98.3.
    column = np.repeat([0, 1, 2], [6, 4, 2])
    rng = np.random.default_rng(0)
    number = 1500
    planned = Counter(tuple(plan_of(column, batch_size=2, seed=seed).bucket_ids.tolist()) for seed in range(number))
    drawn = Counter(draw_by_draw({0: 3, 1: 2, 2: 1}, rng) for _ in range(number))
    assert len(drawn) == 60
    assert chi_squared(planned, drawn) < 98.3

    # Drawing buckets evenly, whatever they have left, is another distribution, and the test sees it.
    def even() -> tuple[int, ...]:
        left, drawn = {0: 3, 1: 2, 2: 1}, []
        while left:
            drawn.append(int(rng.choice([*left])))
            left = {bucket: count - (bucket == drawn[-1]) for bucket, count in left.items()}
            left = {bucket: count for bucket, count in left.items() if count}
        return tuple(drawn)

    assert chi_squared(planned, Counter(even() for _ in range(number))) > 150


def test_a_process_without_lockstep_draws_as_novelai_does() -> None:
    # 2**3 sequences of 2 buckets; the 99.9 % quantile of chi-squared with 7 degrees of freedom is 24.3.
    ids = [0] * 7 + [1] * 6
    rng = np.random.default_rng(1)
    options = {"batch_size": 2, "remainder": "catch_all", "base": 0, "lockstep": False, "num_processes": 2}
    planned = Counter(tuple(plan_of(ids, seed=seed, **options).bucket_ids[::2].tolist()) for seed in range(1500))
    drawn = Counter(novelai_epoch(ids, 2, 2, rng) for _ in range(1500))
    assert chi_squared(planned, drawn) < 24.3


@pytest.mark.parametrize(("config", "message"), [
    ({"remainder": "catch_all"}, "needs `base`"),
    ({"lockstep": False}, 'give `remainder="catch_all"`'),
    ({"lockstep": False, "remainder": "catch_all", "base": 0, "shuffle": False}, "with `shuffle=False`"),
    ({"lockstep": False, "remainder": "catch_all", "base": 0, "batch_size": {0: 1}}, "one batch size for all"),
    ({"remainder": "catch_all", "base": 4, "batch_size": {0: 1, 1: 1}}, r"no size for buckets \[4\]"),
])  # fmt: skip
def test_options_that_do_not_go_together_are_errors(config, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of([0, 1, 1], **{"batch_size": 2, **config})
