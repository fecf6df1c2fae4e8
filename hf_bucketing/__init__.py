"""Fine-tune diffusion transformers on images and videos of every size and length, at their own shape.

The names here need numpy alone. What needs torch, datasets, accelerate or diffusers is imported from its room:
`hf_bucketing.mapping`, `.loading`, `.packing`, `.losses` and `.training`.
"""

from .assignment import Assignment, AssignmentRule, Rejection
from .buckets import BucketTable
from .cost import CostModel
from .errors import BucketingError, CacheError, ColumnError, MediaError, PackingError, PlanError
from .geometry import CropBox, LatentSpec, Size, cover_resize, crop_box
from .image_sizes import ImageSizes
from .ladders import novelai_ladder, token_ladder
from .open_table import OpenTable, open_table

__version__ = "0.1.0.dev0"

__all__ = [
    "Assignment",
    "AssignmentRule",
    "BucketTable",
    "BucketingError",
    "CacheError",
    "ColumnError",
    "CostModel",
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
