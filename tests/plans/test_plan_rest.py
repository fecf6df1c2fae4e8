"""What every plan holds: equal steps, counts that add up, and the rest of an epoch on another number of processes."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hf_bucketing import PlanError
from hf_bucketing.buckets import REJECTED_BUCKET
from hf_bucketing.plans import (
    MIXED,
    PACKED,
    BucketPlanConfig,
    LengthPlanConfig,
    PackPlanConfig,
    plan_buckets,
    plan_lengths,
    plan_packs,
)
from hf_bucketing.plans.rows import occurrences
from tests.plans.plan_cases import COLUMN, LOSSY_PLANS, PLANS, WEIGHTS

USABLE = np.flatnonzero(COLUMN >= 0)
plans = pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
all_plans = pytest.mark.parametrize("make", {**PLANS, **LOSSY_PLANS}.values(), ids={**PLANS, **LOSSY_PLANS})


@plans
@pytest.mark.parametrize("num_processes", [1, 2, 3, 4, 7])
def test_every_sample_is_dealt_once_and_equally_often_to_all_processes(make, num_processes: int) -> None:
    for epoch in range(3):
        plan = make(num_processes=num_processes, epoch=epoch)
        shares = [list(plan.batches(process_index=process)) for process in range(num_processes)]
        assert {len(share) for share in shares} == {plan.num_steps}
        assert all(len(batch) for share in shares for batch in share)
        dealt = np.concatenate([batch for share in shares for batch in share])
        assert len(set(dealt.tolist())) == len(dealt) == plan.kept
        assert set(dealt.tolist()) <= set(USABLE.tolist())
        assert plan.drop_reasons["rejected"] == np.count_nonzero(COLUMN < 0)
        assert plan.drop_reasons.get("remainder", 0) == len(USABLE) - len(dealt) < num_processes
        assert plan.repeated == 0


@all_plans
@pytest.mark.parametrize("num_processes", [1, 2, 5])
def test_kept_repeated_and_dropped_account_for_every_occurrence(make, num_processes: int) -> None:
    plan = make(num_processes=num_processes)
    counts = Counter(plan.indices.tolist())
    assert plan.kept == len(counts)
    assert plan.kept + plan.repeated == len(plan.indices)
    assert set(counts) <= set(USABLE.tolist())


@all_plans
def test_a_plan_depends_on_seed_epoch_and_processes_alone(make) -> None:
    one, same, other = make(num_processes=2), make(num_processes=2), make(num_processes=2, epoch=3)
    for name in ("indices", "offsets", "bucket_ids"):
        assert np.array_equal(getattr(one, name), getattr(same, name))
    assert not np.array_equal(one.indices, other.indices)


@all_plans
def test_the_marks_of_rejected_rows_mixed_batches_and_packs_differ(request, make) -> None:
    assert len({REJECTED_BUCKET, MIXED, PACKED}) == 3
    name, plan = request.node.callspec.id, make(num_processes=3)
    labels = set(plan.bucket_ids.tolist())
    if name.startswith("packs"):
        assert labels == {PACKED}
    elif "random" in name or "sorted" in name:
        assert labels == {MIXED}
    else:
        assert labels <= {MIXED, *range(5)}


@pytest.mark.parametrize(("config", "name", "near"), [
    (BucketPlanConfig, "remainders", "remainder"),
    (LengthPlanConfig, "max_token", "max_tokens"),
    (PackPlanConfig, "strip_len", "strip_length"),
])  # fmt: skip
def test_an_unknown_setting_raises_an_error_with_the_nearest_one(config, name: str, near: str) -> None:
    with pytest.raises(PlanError, match=f"{config.__name__} has no argument {name}; did you mean {near}"):
        config(**{name: 1})


@pytest.mark.parametrize("name", ["short", "drop", "repeat", "catch_all"])
@pytest.mark.parametrize("num_processes", [1, 3])
def test_without_shuffle_rows_and_buckets_come_in_their_order_in_every_epoch(name: str, num_processes: int) -> None:
    config = BucketPlanConfig(batch_size=4, remainder=name, base=2, shuffle=False)
    plans = [plan_buckets(COLUMN, config, epoch=epoch, num_processes=num_processes) for epoch in (0, 1)]
    assert np.array_equal(plans[0].indices, plans[1].indices)
    plan = plans[0]
    per_step = plan.bucket_ids[::num_processes]
    whole = per_step[per_step >= 0] if name != "catch_all" else per_step[: np.argmax(np.diff(per_step) < 0) + 1]
    assert whole.tolist() == sorted(whole.tolist())
    for bucket in range(5):
        rows = plan.indices[np.repeat(plan.bucket_ids == bucket, np.diff(plan.offsets))]
        unseen = rows[np.sort(np.unique(rows, return_index=True)[1])]
        assert name == "catch_all" or unseen.tolist() == sorted(unseen.tolist())
    assert plan.kept == len(set(plan.indices.tolist()))


@plans
@settings(max_examples=25)
@given(counts=st.lists(st.integers(1, 5), min_size=2, max_size=5), share=st.floats(0, 1))
def test_nothing_is_lost_when_the_number_of_processes_changes_within_an_epoch(make, counts, share: float) -> None:
    seen: list[int] = []
    for num_processes in counts:
        plan = make(num_processes=num_processes, consumed=np.array(seen, np.int64))
        assert plan.consumed == len(seen)
        assert plan.kept + plan.dropped + plan.consumed == len(COLUMN)
        assert plan.drop_reasons.get("remainder", 0) < num_processes
        seen += plan.indices[: plan.samples_in_steps(0, int(share * plan.num_steps))].tolist()
    rest = make(num_processes=1, consumed=np.array(seen, np.int64))
    assert sorted([*seen, *rest.indices.tolist()]) == USABLE.tolist()


@all_plans
def test_nothing_consumed_is_the_whole_plan(make) -> None:
    whole, empty = make(num_processes=2), make(num_processes=2, consumed=np.zeros(0, np.int64))
    assert np.array_equal(whole.indices, empty.indices)
    assert np.array_equal(whole.offsets, empty.offsets)


@all_plans
def test_an_epoch_with_nothing_left_is_a_plan_without_steps(make) -> None:
    plan = make(num_processes=3, consumed=np.concatenate([USABLE] * 3))
    assert (plan.num_steps, plan.kept, plan.repeated, plan.num_mixed_steps) == (0, 0, 0, 0)
    assert plan.drop_reasons.get("remainder", 0) == 0
    assert plan.summary(num_tokens=COLUMN)["num_steps"] == 0
    with pytest.raises(PlanError, match="from 0 to 119, got 7 to 120"):
        make(num_processes=1, consumed=[7, 120])


@pytest.mark.parametrize("name", ["buckets weighted", "lengths weighted", "packs weighted"])
def test_weighted_rows_come_as_often_as_they_weigh(name: str) -> None:
    total: Counter[int] = Counter()
    for epoch in range(8):
        plan = LOSSY_PLANS[name](num_processes=1, epoch=epoch)
        counts = Counter(plan.indices.tolist())
        total += counts
        assert all(counts[row] in (np.floor(WEIGHTS[row]), np.ceil(WEIGHTS[row])) for row in USABLE)
        assert plan.drop_reasons["weight"] == len(USABLE) - len(counts)
        seen = plan.indices[: plan.offsets[plan.num_batches // 2]]
        rest = LOSSY_PLANS[name](num_processes=1, epoch=epoch, consumed=seen)
        assert Counter(seen.tolist()) + Counter(rest.indices.tolist()) == counts
    assert all(total[row] == 8 * WEIGHTS[row] for row in USABLE)


@given(st.lists(st.floats(0, 5, allow_subnormal=False), min_size=1, max_size=30), st.integers(0, 50))
def test_every_run_of_epochs_meets_the_weights(weights, first: int) -> None:
    values = np.array(weights)
    drawn = np.zeros(len(values), np.int64)
    for number in range(1, 12):
        drawn += occurrences(values, seed=3, epoch=first + number - 1)
        assert np.all(np.abs(drawn - number * values) < 1 + 1e-9)


def test_over_seeds_the_expected_number_is_the_weight() -> None:
    weights = np.array([0.3, 0.3, 0.71, 1.05])
    drawn = np.mean([occurrences(weights, seed=seed, epoch=4) for seed in range(4000)], axis=0)
    assert np.abs(drawn - weights).max() < 4 * 0.5 / np.sqrt(4000)


def test_weights_by_bucket_mix_data_sets() -> None:
    column = np.repeat([0, 1, 2], 40)
    config = BucketPlanConfig(batch_size=2)
    plan = plan_buckets(column, config, epoch=0, num_processes=2, weights={0: 3, 1: 0.25})
    assert np.bincount(column[plan.indices]).tolist() == [120, 10, 40]
    assert (plan.kept, plan.repeated, dict(plan.drop_reasons)) == (90, 80, {"weight": 30})


@pytest.mark.parametrize(("weights", "message"), [
    ([1.0], r"expected shape \(3,\), got \(1,\)"),
    ([1.0, -1, 0], "at least 0"),
    ([1.0, np.nan, 0], "finite"),
])  # fmt: skip
def test_impossible_weights_are_errors(weights, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_buckets([0, 0, 1], BucketPlanConfig(batch_size=1), epoch=0, num_processes=1, weights=weights)


SPREAD = {
    "buckets": partial(plan_buckets, config=BucketPlanConfig(batch_size=8)),
    "buckets in order": partial(plan_buckets, config=BucketPlanConfig(batch_size=8, shuffle=False)),
    "buckets repeat": partial(plan_buckets, config=BucketPlanConfig(batch_size=8, remainder="repeat")),
    "buckets catch-all": partial(plan_buckets, config=BucketPlanConfig(batch_size=8, remainder="catch_all", base=1)),
    "buckets without lockstep": partial(
        plan_buckets, config=BucketPlanConfig(batch_size=4, remainder="catch_all", base=1, lockstep=False)
    ),
    "lengths": partial(plan_lengths, config=LengthPlanConfig(batch_size=8, num_buckets=3)),
    "lengths random": partial(plan_lengths, config=LengthPlanConfig(batch_size=8, strategy="random")),
    "lengths sorted": partial(plan_lengths, config=LengthPlanConfig(batch_size=8, strategy="sorted")),
    "lengths sorted, of many tokens": partial(plan_lengths, config=LengthPlanConfig(max_tokens=30, strategy="sorted")),
    "packs": partial(plan_packs, config=PackPlanConfig(max_tokens=16, strip_length=1)),
    "packs in order": partial(plan_packs, config=PackPlanConfig(max_tokens=16, strip_length=1, strategy="sequential")),
}


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("weights", [[2.0], [3.0, 1.0, 1.0, 2.0], [5.0, *[1.0] * 9]], ids=str)
def test_a_weighted_row_comes_at_most_once_per_batch(name: str, weights: list[float]) -> None:
    column = np.random.default_rng(4).integers(1, 4, 300)
    for epoch in range(3):
        plan = SPREAD[name](column, epoch=epoch, num_processes=2, weights=np.resize(weights, 300))
        batches = [batch.tolist() for batch in plan.batches()]
        assert len(plan.indices) > 1.3 * 300
        assert [batch for batch in batches if len(batch) != len(set(batch))] == []
        if "in order" not in name and name != "lengths sorted":
            sets = Counter(frozenset(batch) for batch in batches if len(batch) > 3)
            assert sum(sets.values()) - len(sets) <= 1, "a row meets other rows when it comes again"


def test_a_row_of_more_occurrences_than_batches_is_spread_evenly_over_them() -> None:
    weights = np.where(np.arange(100) == 7, 60.0, 1.0)
    plan = plan_buckets([0] * 100, BucketPlanConfig(batch_size=8), epoch=0, num_processes=1, weights=weights)
    times = [np.count_nonzero(batch == 7) for batch in plan.batches() if len(batch) == 8]
    assert len(times) == 19
    assert max(times) <= 4, "60 occurrences in 20 batches are 3 each"
    assert min(times) >= 2
