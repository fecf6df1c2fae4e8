"""The rest of an epoch, planned again for another number of processes; weights and repeats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_bucketing import PlanError
from hf_bucketing.sampling import BucketPlanConfig, EpochPlan, PackPlanConfig, plan_buckets, plan_packs

COLUMN = np.random.default_rng(0).integers(-1, 5, 120)


def bucket_plan(**options) -> EpochPlan:
    return plan_buckets(COLUMN, BucketPlanConfig(batch_size=3, seed=1), epoch=2, **options)


def pack_plan(**options) -> EpochPlan:
    return plan_packs(COLUMN + 1, PackPlanConfig(capacity=12, seed=1), epoch=2, **options)


MAKERS = {"buckets": bucket_plan, "packs": pack_plan}
plans = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@plans
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
    assert sorted([*seen, *rest.indices.tolist()]) == np.flatnonzero(COLUMN >= 0).tolist()


@plans
def test_nothing_consumed_is_the_whole_plan(make) -> None:
    whole, empty = make(num_processes=2), make(num_processes=2, consumed=np.zeros(0, np.int64))
    assert np.array_equal(whole.indices, empty.indices)
    assert np.array_equal(whole.offsets, empty.offsets)


@plans
def test_an_epoch_with_nothing_left_is_a_plan_without_steps(make) -> None:
    plan = make(num_processes=3, consumed=np.flatnonzero(COLUMN >= 0)[2:])
    assert (plan.num_steps, plan.kept, plan.drop_reasons["remainder"]) == (0, 0, 2)
    assert plan.num_mixed_steps == 0
    with pytest.raises(PlanError, match="from 0 to 119, got 7 to 120"):
        make(num_processes=1, consumed=[7, 120])
