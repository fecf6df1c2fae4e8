"""Pack plans: limits by tokens, cost and samples; strategies; which packs meet in a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hf_bucketing import PlanError
from hf_bucketing.buckets.cost import CostModel
from hf_bucketing.plans import EpochPlan, PackPlanConfig, plan_packs
from hf_bucketing.plans.bin_packing import FirstFit, Limits
from hf_bucketing.plans.packs import packs_of

COST = CostModel(linear=1, quadratic=0.05)
MIX = np.random.default_rng(0).lognormal(4, 1.2, 6000).astype(int).clip(1, 1000)

columns = st.lists(st.integers(1, 64), min_size=5, max_size=120)
strategies = st.sampled_from(["sequential", "first_fit", "best_fit_decreasing"])


def plan_of(tokens, *, num_processes: int = 1, text_tokens=0, **config) -> EpochPlan:
    return plan_packs(
        tokens,
        PackPlanConfig(**{"strip_length": 1, **config}),
        epoch=0,
        num_processes=num_processes,
        text_tokens=text_tokens,
    )


def fill(plan: EpochPlan, tokens, capacity: int) -> float:
    return 1 - plan.summary(num_tokens=tokens, max_tokens=capacity)["padding"]


@given(
    columns,
    strategies,
    processes := st.integers(1, 4),
    st.sampled_from([None, 1, 4]),
    st.sampled_from([None, 270.0, 400.0]),
    st.sampled_from([0, 7]),
    st.booleans(),
)
def test_packs_keep_to_every_limit_at_once(
    tokens, strategy, num_processes, max_samples, max_cost, text, shuffle
) -> None:
    column = np.array(tokens)
    config = {"max_tokens": 120, "strategy": strategy, "window": 16, "strip_length": 8, "open_packs": 3}
    config |= {"max_samples": max_samples, "max_cost": max_cost, "cost_model": max_cost and COST, "oversize": "drop"}
    config["shuffle"] = shuffle
    spans = -(-column // 8) * 8 + text
    fits = spans <= 120
    if max_cost:
        fits &= COST.cost(spans) <= max_cost
    if np.count_nonzero(fits) < num_processes:
        return
    plan = plan_of(column, num_processes=num_processes, text_tokens=text, **config)
    assert plan.drop_reasons.get("oversize", 0) == np.count_nonzero(~fits)
    assert plan.kept == np.count_nonzero(fits) - plan.drop_reasons.get("remainder", 0)
    assert plan.drop_reasons.get("remainder", 0) < num_processes
    assert len(set(plan.indices.tolist())) == plan.kept
    for pack in plan.batches():
        assert spans[pack].sum() <= 120
        assert max_samples is None or len(pack) <= max_samples
        assert max_cost is None or COST.cost(spans[pack]).sum() <= max_cost * (1 + 1e-9)


def test_strategies_fill_packs_better_in_their_order() -> None:
    fills = [
        fill(plan_of(MIX, max_tokens=1000, strategy=name), MIX, 1000)
        for name in ("sequential", "first_fit", "best_fit_decreasing")
    ]
    assert fills[0] < 0.92 < fills[1] < fills[2]
    assert fills[2] > 0.998


def test_packs_are_numbered_without_gaps_nearly_in_the_order_of_their_samples() -> None:
    names = ("sequential", "first_fit", "best_fit_decreasing")
    moved = {}
    for name in names:
        packs = packs_of(
            MIX, np.zeros(len(MIX)), PackPlanConfig(max_tokens=1000, strip_length=1, strategy=name, window=512)
        )
        assert set(packs.tolist()) == set(range(packs.max() + 1))
        moved[name] = np.abs(packs - np.maximum.accumulate(packs)).max() / packs.max()
    assert moved["sequential"] == 0
    assert moved["first_fit"] < 0.15


def test_first_fit_takes_samples_one_by_one_and_says_which_packs_are_closed() -> None:
    limits = Limits(tokens=10, cost=np.inf, samples=3, smallest=2, cheapest=0.0)
    packs = FirstFit(limits, open_packs=2)
    assert [packs.add(span) for span in (6, 7, 3)] == [0, 1, 0]
    assert packs.closed == [0], "no sample is as small as its room"
    assert [packs.add(span) for span in (4, 9)] == [2, 3]
    assert packs.closed == [0, 1, 3], "pack 1 was the fuller of two"
    assert packs.reopen(7, count=2) == 4
    assert packs.add(2) == 2, "the oldest open pack with room comes first"
    packs.close(2)
    assert packs.add(1) == 4
    assert packs.closed == [0, 1, 3, 2, 4], "pack 4 holds three samples"


def test_a_window_carries_its_emptiest_packs_on() -> None:
    tokens = np.tile([60, 39], 200)
    carried = plan_of(tokens, max_tokens=100, strategy="best_fit_decreasing", window=10)
    assert carried.num_steps < 1.07 * 200
    assert plan_of(tokens, max_tokens=100, strategy="best_fit_decreasing", window=400).num_steps == 200


def step_costs(plan: EpochPlan, *, window: int = 1) -> np.ndarray:
    costs = COST.pack_cost(MIX[plan.indices], plan.offsets).reshape(-1, plan.num_processes)
    whole = len(costs) // window * window
    return costs[:whole].reshape(-1, window, plan.num_processes).sum(axis=1)


def efficiency(costs: np.ndarray) -> float:
    return float((costs.mean(axis=1) / costs.max(axis=1)).mean())


@pytest.mark.parametrize("num_processes", [2, 8])
def test_balance_by_cost_lets_no_process_wait(num_processes: int) -> None:
    options = {"max_tokens": 1000, "cost_model": COST, "num_processes": num_processes}
    assert efficiency(step_costs(plan_of(MIX, **options))) < 0.85
    assert efficiency(step_costs(plan_of(MIX, **options, balance="cost"))) > 0.96
    windows = plan_of(MIX, **options, balance="cost", accumulation_steps=8)
    assert efficiency(step_costs(windows, window=8)) > 0.97
    assert efficiency(step_costs(windows)) < 0.9, "balanced over each window, not in each step"
    filled = plan_of(MIX, **{**options, "max_tokens": 100_000}, max_cost=float(COST.cost(1000)))
    assert efficiency(step_costs(filled)) > 0.97


def test_balancing_changes_neither_the_packs_nor_their_number() -> None:
    plans = [
        plan_of(MIX, max_tokens=1000, cost_model=COST, num_processes=4, balance=name) for name in ("none", "cost")
    ]
    first, second = ({tuple(pack.tolist()) for pack in plan.batches()} for plan in plans)
    assert first == second
    like = step_costs(plans[1]).max(axis=1)
    assert abs(np.corrcoef(like[1:], like[:-1])[0, 1]) < 0.2, "cheap and expensive steps alternate at random"


def test_samples_above_a_limit_get_a_pack_of_their_own_or_are_counted() -> None:
    tokens = [5, 40, 6, 0, 7, 33]
    with pytest.raises(PlanError, match=r"Row 1 takes 40 tokens and exceeds `max_tokens=30` \(2 of 6 rows do\)"):
        plan_of(tokens, max_tokens=30)
    with pytest.raises(PlanError, match=r"Row 1 takes 40 tokens and exceeds `max_cost=80` \(2 of 6 rows do\)"):
        plan_of(tokens, max_tokens=90, max_cost=80, cost_model=COST)
    with pytest.raises(PlanError, match="Row 1 takes 52 tokens"):
        plan_of(tokens, max_tokens=41, text_tokens=[1, 12, 0, 99, 0, 0])
    with pytest.raises(PlanError, match=r"Row 1 takes 64 tokens, in strips of 32, and exceeds `max_tokens=60`"):
        plan_of(tokens, max_tokens=60, strip_length=32)
    own = plan_of(tokens, max_tokens=30, oversize="own_batch")
    assert {frozenset(pack.tolist()) for pack in own.batches()} == {
        frozenset({0, 2, 4}),
        frozenset({1}),
        frozenset({5}),
    }
    dropped = plan_of(tokens, max_tokens=30, oversize="drop")
    assert dict(dropped.drop_reasons) == {"rejected": 1, "oversize": 2}


@pytest.mark.parametrize(("config", "message"), [
    ({"max_tokens": 9, "strategy": "magic"}, '`strategy` must be one of "sequential", "first_fit"'),
    ({"max_tokens": 9, "balance": "time"}, '`balance` must be one of "none", "cost"'),
    ({"max_tokens": 9, "oversize": "cut"}, '`oversize` must be one of "error", "own_batch", "drop"'),
    ({"max_tokens": 9, "window": 0}, "`window` must be at least 1"),
    ({"max_tokens": 9, "max_cost": 0.0, "cost_model": COST}, "`max_cost` must be above 0"),
    ({"max_tokens": 9, "max_cost": 1.0}, "need `cost_model`"),
    ({"max_tokens": 9, "balance": "cost"}, "need `cost_model`"),
    ({"max_tokens": 9, "balance": "cost", "cost_model": COST, "shuffle": False}, "with `shuffle=False`"),
    ({"max_tokens": 9, "text_tokens": [1, 2]}, r"expected shape \(3,\), got \(2,\)"),
    ({"max_tokens": 9, "text_tokens": -1}, "`text_tokens` must be at least 0"),
])  # fmt: skip
def test_impossible_pack_plans_are_errors(config, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of([1, 2, 3], **config)
