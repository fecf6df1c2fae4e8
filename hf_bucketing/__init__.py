"""Fine-tune diffusion transformers on images and videos of every size and length, at their own shape.

The names here need numpy alone. What needs torch, datasets, accelerate or diffusers is imported from its room:
`hf_bucketing.columns`, `.loading`, `.packing`, `.losses` and `.training`.
"""

from .buckets.assignment import Assignment, AssignmentRule, Rejection
from .buckets.ladders import novelai_ladder, token_ladder
from .buckets.open_table import ImageSizes, OpenTable, open_table
from .buckets.sizes import CropBox, LatentSpec, Size, cover_resize, crop_box
from .buckets.table import BucketTable
from .errors import BucketingError, CacheError, ColumnError, MediaError, PackingError, PlanError

__version__ = "0.1.0.dev0"

__all__ = [
    "Assignment",
    "AssignmentRule",
    "BucketTable",
    "BucketingError",
    "CacheError",
    "ColumnError",
    "CropBox",
    "ImageSizes",
    "LatentSpec",
    "MediaError",
    "OpenTable",
    "PackingError",
    "PlanError",
    "Rejection",
    "Size",
    "cover_resize",
    "crop_box",
    "novelai_ladder",
    "open_table",
    "token_ladder",
]
