"""Epoch plans: which rows, in which step, on which process. Pure functions of their arguments, in numpy."""

from .bucket_config import BucketPlanConfig
from .bucket_plan import plan_buckets
from .length_config import LengthPlanConfig
from .length_plan import length_buckets, plan_lengths
from .pack_config import PackPlanConfig
from .pack_plan import plan_packs
from .plan import EpochPlan

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
