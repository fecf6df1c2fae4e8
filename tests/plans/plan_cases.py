"""One plan of every kind, for the tests that all plans must pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hf_bucketing.buckets.cost import CostModel
from hf_bucketing.plans import (
    BucketPlanConfig,
    EpochPlan,
    LengthPlanConfig,
    PackPlanConfig,
    plan_buckets,
    plan_lengths,
    plan_packs,
)

COLUMN = np.random.default_rng(0).integers(-1, 5, 120)
WEIGHTS = np.random.default_rng(1).choice([0.0, 0.5, 1.0, 2.25], 120)
COST = CostModel(linear=1, quadratic=0.1)


def bucket_plan(weights: object = None, **config: object) -> Callable[..., EpochPlan]:
    settings = BucketPlanConfig(**{"batch_size": 3, "seed": 1, **config})
    return lambda **options: plan_buckets(COLUMN, settings, **{"epoch": 2, "weights": weights, **options})


def pack_plan(weights: object = None, **config: object) -> Callable[..., EpochPlan]:
    settings = PackPlanConfig(**{"max_tokens": 12, "strip_length": 1, "seed": 1, **config})
    return lambda **options: plan_packs(COLUMN + 1, settings, **{"epoch": 2, "weights": weights, **options})


def length_plan(weights: object = None, **config: object) -> Callable[..., EpochPlan]:
    settings = LengthPlanConfig(**{"max_tokens": 12.5, "num_buckets": 3, "seed": 1, **config})
    return lambda **options: plan_lengths((COLUMN + 1) / 2, settings, **{"epoch": 2, "weights": weights, **options})


PLANS: dict[str, Callable[..., EpochPlan]] = {
    "buckets": bucket_plan(),
    "buckets of their own batch size": bucket_plan(batch_size={0: 1, 1: 2, 2: 3, 3: 4, 4: 5}),
    "buckets catch-all": bucket_plan(remainder="catch_all", base=2),
    "lengths": length_plan(),
    "lengths of fixed batches": length_plan(max_tokens=None, batch_size=4),
    "lengths random": length_plan(strategy="random"),
    "lengths sorted": length_plan(strategy="sorted"),
    "packs": pack_plan(),
    "packs in order": pack_plan(strategy="sequential"),
    "packs best fit": pack_plan(strategy="best_fit_decreasing", window=40),
    "packs of like cost": pack_plan(balance="cost", cost_model=COST),
    "packs balanced by window": pack_plan(balance="cost", cost_model=COST, accumulation_steps=4),
    "packs by cost": pack_plan(max_tokens=100, max_cost=13.5, cost_model=COST),
}
"""Plans that hold every sample but fewer than `num_processes`, at most once."""

LOSSY_PLANS: dict[str, Callable[..., EpochPlan]] = {
    "buckets drop": bucket_plan(remainder="drop"),
    "buckets repeat": bucket_plan(remainder="repeat"),
    "buckets without lockstep": bucket_plan(remainder="catch_all", base=2, lockstep=False),
    "buckets weighted": bucket_plan(WEIGHTS),
    "lengths drop": length_plan(remainder="drop"),
    "lengths random drop": length_plan(strategy="random", remainder="drop"),
    "lengths weighted": length_plan(WEIGHTS),
    "packs weighted": pack_plan(WEIGHTS),
}
"""Plans that leave out more, or repeat samples."""
