"""One epoch's plan for each strategy."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from ..buckets.assignment import REJECTED_BUCKET, has_bucket
from ..plans.buckets import BucketPlanConfig, plan_buckets
from ..plans.epoch import EpochPlan
from ..plans.packs import PackPlanConfig, plan_packs
from .config import ReportConfig
from .targets import Targets


def plan_bucketing(targets: Targets, config: ReportConfig) -> EpochPlan:
    """Plan batches of one bucket. Without a sample for each process, the plan has no step."""
    return _plan_rows(targets.bucket_id.astype(np.int64), config)


def plan_padding(targets: Targets, config: ReportConfig) -> EpochPlan:
    """Plan batches of any samples, drawn at random, of equal number on all processes in every step."""
    return _plan_rows(np.where(has_bucket(targets.bucket_id), 0, REJECTED_BUCKET), config)


def plan_packing(targets: Targets, config: ReportConfig, *, capacity: int) -> EpochPlan:
    """Plan packs of any samples that fit the capacity.

    Raises:
        PlanError: If a sample exceeds it.
    """
    if np.count_nonzero(targets.num_tokens) < config.num_processes:
        return _empty_plan(targets.num_tokens > 0, config)
    packs = PackPlanConfig(max_tokens=capacity, strip_length=config.strip_length, seed=config.seed)
    return plan_packs(targets.num_tokens, packs, epoch=0, num_processes=config.num_processes)


def default_capacity(targets: Targets, config: ReportConfig) -> int:
    """Return `batch_size` samples of median tokens, or the largest sample in whole strips where that is more.

    0 if every sample is rejected.
    """
    tokens = targets.num_tokens[targets.num_tokens > 0]
    if not len(tokens):
        return 0
    return max(int(np.median(tokens)) * config.batch_size, int(strip_tokens(tokens, config).max()))


def strip_tokens(num_tokens: IntArray, config: ReportConfig) -> IntArray:
    """Return the tokens of whole strips that each sample takes in a pack; shape as given."""
    return -(-num_tokens // config.strip_length) * config.strip_length


def _plan_rows(bucket_ids: IntArray, config: ReportConfig) -> EpochPlan:
    if np.count_nonzero(bucket_ids >= 0) < config.num_processes:
        return _empty_plan(bucket_ids >= 0, config)
    settings = BucketPlanConfig(batch_size=config.batch_size, seed=config.seed)
    return plan_buckets(bucket_ids, settings, epoch=0, num_processes=config.num_processes)


def _empty_plan(usable: npt.NDArray[np.bool_], config: ReportConfig) -> EpochPlan:
    """Return a plan without a step, so that a report can say why: too few samples are usable."""
    remainder = int(np.count_nonzero(usable))
    reasons = {"rejected": len(usable) - remainder, "remainder": remainder}
    return EpochPlan(
        indices=np.zeros(0, np.int64),
        offsets=np.zeros(1, np.int64),
        bucket_ids=np.zeros(0, np.int32),
        num_processes=config.num_processes,
        drop_reasons=MappingProxyType({reason: count for reason, count in reasons.items() if count}),
    )
