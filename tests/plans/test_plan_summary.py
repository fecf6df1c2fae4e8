"""What a plan says about itself, and its most expensive step first."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hf_bucketing import PlanError
from hf_bucketing.plans import MIXED, EpochPlan
from tests.plans.plan_cases import COLUMN, LOSSY_PLANS, PLANS

PLAN = EpochPlan(
    indices=np.array([0, 1, 2, 3, 4, 5, 6]),
    offsets=np.array([0, 2, 4, 5, 7]),
    bucket_ids=np.array([0, 0, MIXED, MIXED], np.int32),
    num_processes=2,
    repeated=1,
    drop_reasons={"rejected": 3},
    consumed=2,
)
TOKENS = np.array([4, 2, 3, 3, 1, 5, 5, 99])


def test_a_summary_holds_the_counts() -> None:
    assert PLAN.summary() == {
        "num_processes": 2,
        "num_steps": 2,
        "num_mixed_steps": 1,
        "kept": 6,
        "repeated": 1,
        "consumed": 2,
        "dropped": {"rejected": 3},
    }


def test_padded_batches_cost_their_longest_sample_times_their_number() -> None:
    summary = PLAN.summary(num_tokens=TOKENS)
    assert summary["padding"] == pytest.approx(1 - 23 / (8 + 6 + 1 + 10))
    assert summary["cost_imbalance"] == pytest.approx((8 + 10) / (7 + 5.5))
    assert summary["cheapest_step"] == {"step": 0, "cost": 8}
    assert summary["most_expensive_step"] == {"step": 1, "cost": 10}


def test_packs_cost_the_sum_of_their_samples_and_have_room_for_max_tokens() -> None:
    with pytest.raises(PlanError, match="summary has no argument max_token; did you mean max_tokens"):
        PLAN.summary(num_tokens=TOKENS, max_token=10)
    summary = PLAN.summary(num_tokens=TOKENS, costs=TOKENS**2, max_tokens=10)
    assert summary["padding"] == pytest.approx(1 - 23 / 40)
    assert summary["cost_imbalance"] == pytest.approx((20 + 50) / (19 + 25.5))
    assert summary["cheapest_step"] == {"step": 0, "cost": 20}


@pytest.mark.parametrize("make", {**PLANS, **LOSSY_PLANS}.values(), ids={**PLANS, **LOSSY_PLANS})
def test_every_summary_is_json_and_the_most_expensive_step_can_come_first(make) -> None:
    plan = make(num_processes=3)
    costs = (COLUMN + 2) ** 2
    summary = plan.summary(costs=costs, max_tokens=1)
    assert json.loads(json.dumps(summary)) == summary
    moved = plan.most_expensive_first(costs[plan.indices])
    step, cost = summary["most_expensive_step"].values()
    front = moved.summary(costs=costs, max_tokens=1)
    assert front == {**summary, "most_expensive_step": {"step": 0, "cost": cost}} | {
        "cheapest_step": front["cheapest_step"],
        "cost_imbalance": pytest.approx(summary["cost_imbalance"]),
    }
    order = [step, *(other for other in range(plan.num_steps) if other != step)]
    for name in ("batches", "labels"):
        whole, shifted = (
            [batch.tolist() for batch in p.batches()] if name == "batches" else p.bucket_ids.tolist()
            for p in (plan, moved)
        )
        assert shifted == [whole[3 * step + process] for step in order for process in range(3)]
