"""An epoch as data: which rows come in which step on which process."""

from .bin_packing import PackPlanConfig
from .buckets import BucketPlanConfig, plan_buckets
from .epoch import EpochPlan
from .lengths import LengthPlanConfig, length_buckets, plan_lengths
from .packs import plan_packs

__all__ = [
    "BucketPlanConfig",
    "EpochPlan",
    "LengthPlanConfig",
    "PackPlanConfig",
    "length_buckets",
    "plan_buckets",
    "plan_lengths",
    "plan_packs",
]
