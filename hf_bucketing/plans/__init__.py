"""An epoch as data: the rows of every step on every process."""

from .buckets import BucketPlanConfig, plan_buckets
from .epoch import MIXED, PACKED, EpochPlan
from .lengths import LengthPlanConfig, length_buckets, plan_lengths
from .packs import PackPlanConfig, plan_packs

__all__ = [
    "MIXED",
    "PACKED",
    "BucketPlanConfig",
    "EpochPlan",
    "LengthPlanConfig",
    "PackPlanConfig",
    "length_buckets",
    "plan_buckets",
    "plan_lengths",
    "plan_packs",
]
