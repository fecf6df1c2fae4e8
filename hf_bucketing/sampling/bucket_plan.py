"""The bucket plan: every batch of one bucket, every step of one bucket on all processes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from .assemble import lockstep_plan
from .bucket_config import BucketPlanConfig
from .deal import Steps, deal, group_rows
from .independent import plan_independent
from .plan import EpochPlan, IntArray, check_processes, rng_for
from .rows import EpochRows, FloatArray, epoch_rows

Weights = npt.ArrayLike | Mapping[int, float]


def plan_buckets(
    bucket_ids: npt.ArrayLike,
    config: BucketPlanConfig,
    *,
    epoch: int,
    num_processes: int,
    weights: Weights | None = None,
    consumed: npt.ArrayLike | None = None,
) -> EpochPlan:
    """Plan an epoch of bucketed batches.

    Args:
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row; negative for rejected rows, which are dropped.
        config ([`BucketPlanConfig`]): Batch sizes, tail policy and seed.
        epoch (`int`): Not negative; every epoch has its own order.
        num_processes (`int`): At least 1.
        weights (array of `float`, shape `(n,)`, or mapping of bucket id to `float`, *optional*): How often each row,
            or each row of a bucket, comes per epoch: 2.0 twice, 0.5 in every second epoch. Buckets that a mapping
            does not name have weight 1. By default every row comes once.
        consumed (array of `int`, *optional*): Row numbers that were seen in this epoch, as often as they were; the
            plan then holds what the epoch has left, which may be no step at all.

    Returns:
        [`EpochPlan`]: With drop reasons `rejected`, `weight` (rows that do not come in this epoch) and `remainder`.
        Steps stand in one uniform random order, which has the distribution of drawing buckets one after the other
        weighted by the steps that they have left.

    Raises:
        PlanError: If no row has a bucket, or too few for one step, or a bucket has no batch size.

    Example:
        Seven rows of bucket 0 and four of bucket 3, two processes, batches of two: one full step of each, then one
        short step of one row per process for the three rows that bucket 0 has left; its last row is dropped.

        >>> plan = plan_buckets([0] * 7 + [3] * 4, BucketPlanConfig(batch_size=2), epoch=0, num_processes=2)
        >>> plan.num_steps, plan.kept, dict(plan.drop_reasons), sorted(plan.bucket_ids.tolist())
        (3, 10, {'remainder': 1}, [0, 0, 0, 0, 3, 3])
    """
    check_processes(num_processes)
    ids = np.asarray(bucket_ids) if np.size(bucket_ids) else np.zeros(0, np.int64)
    by_row = row_weights(ids, weights) if isinstance(weights, Mapping) else weights
    chosen = epoch_rows(ids >= 0, weights=by_row, consumed=consumed, seed=config.seed, epoch=epoch)
    if not len(chosen.rows) and not chosen.consumed:
        raise PlanError(
            "No row has a bucket: the data set is empty or every row was rejected. "
            "Look at the counts of its rejection column, and choose a table that fits the data."
        )
    rng = rng_for(config.seed, epoch, "buckets", consumed=chosen.consumed)
    if config.lockstep:
        plan = plan_lockstep(ids, config, chosen=chosen, num_processes=num_processes, rng=rng)
    else:
        plan = plan_independent(ids, config, chosen=chosen, num_processes=num_processes, rng=rng)
    if not plan.num_steps and not chosen.consumed:
        raise PlanError(
            f"{len(chosen.rows)} rows with a bucket do not fill one step of {num_processes} processes"
            + (' under `tail="drop"`; use `tail="short"` or smaller batches.' if config.tail == "drop" else ".")
        )
    return plan


def plan_lockstep(
    bucket_ids: IntArray,
    config: BucketPlanConfig,
    *,
    chosen: EpochRows,
    num_processes: int,
    rng: np.random.Generator | None,
) -> EpochPlan:
    """Plan steps in which all processes take the same bucket; without a generator, rows and buckets in their order."""
    groups = group_rows(chosen.rows, bucket_ids, rng=rng)
    spare = None
    if config.tail == "repeat" and rng is not None and chosen.consumed:
        # Of a bucket of which little is left, rows seen before come again first, instead of the same few many times.
        spare = group_rows(np.concatenate([rng.permutation(chosen.seen), groups.rows]), bucket_ids, rng=None)
    dealt = deal(
        groups,
        config.batch_sizes(groups.buckets),
        num_processes=num_processes,
        tail=config.tail,
        base_size=config.base_size,
        spare=spare,
        rng=rng,
    )
    del groups
    steps = dealt.steps
    if rng is None:
        order = np.argsort(np.where(steps.bucket < 0, np.iinfo(np.int64).max, steps.bucket), kind="stable")
    else:
        order = rng.permutation(len(steps.first))
    steps = Steps(*(column[order] for column in steps))
    return lockstep_plan(
        dealt.rows,
        steps,
        bucket_ids=bucket_ids,
        base=config.base,
        num_processes=num_processes,
        chosen=chosen,
        filled=dealt.filled,
    )


def row_weights(bucket_ids: IntArray, weights: Mapping[int, float]) -> FloatArray:
    """Return each row's weight, from weights by bucket; 1 for buckets that are not named."""
    by_row = np.ones(len(bucket_ids))
    for bucket, weight in weights.items():
        by_row[bucket_ids == bucket] = weight
    return by_row
