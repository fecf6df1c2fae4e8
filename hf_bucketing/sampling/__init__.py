"""Epoch plans: which rows, in which step, on which process. Pure functions of their arguments, in numpy."""

from .bucket_plan import BucketPlanConfig, plan_buckets
from .pack_plan import PackPlanConfig, plan_packs
from .plan import EpochPlan

__all__ = ["BucketPlanConfig", "EpochPlan", "PackPlanConfig", "plan_buckets", "plan_packs"]
