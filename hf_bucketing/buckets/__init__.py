"""Sizes, rounding, crops, bucket tables, ladders and the assignment of samples to buckets."""

from .assignment import REJECTED_BUCKET, Assignment, AssignmentRule, Rejection
from .cost import CostFit, CostModel, fit_costs, read_cost_model
from .fitted import fitted_ladder
from .ladders import novelai_ladder, token_ladder
from .open_table import ImageSizes, OpenTable, open_table
from .sizes import CropBox, LatentSpec, Size, cover_resize, crop_box
from .table import BucketTable

__all__ = [
    "REJECTED_BUCKET",
    "Assignment",
    "AssignmentRule",
    "BucketTable",
    "CostFit",
    "CostModel",
    "CropBox",
    "ImageSizes",
    "LatentSpec",
    "OpenTable",
    "Rejection",
    "Size",
    "cover_resize",
    "crop_box",
    "fit_costs",
    "fitted_ladder",
    "novelai_ladder",
    "open_table",
    "read_cost_model",
    "token_ladder",
]
