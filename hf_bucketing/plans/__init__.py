"""An epoch as data: the rows of every step on every process."""

from .buckets import BucketLimits, BucketPlanConfig, plan_buckets
from .epoch import MIXED, PACKED, EpochPlan
from .lengths import LengthPlanConfig, length_buckets, plan_lengths
from .packs import PackLimits, PackPlanConfig, plan_packs
from .rows import EpochConfig, RowPlanConfig

__all__ = [
    "MIXED",
    "PACKED",
    "BucketLimits",
    "BucketPlanConfig",
    "EpochConfig",
    "EpochPlan",
    "LengthPlanConfig",
    "PackLimits",
    "PackPlanConfig",
    "RowPlanConfig",
    "length_buckets",
    "plan_buckets",
    "plan_lengths",
    "plan_packs",
]
