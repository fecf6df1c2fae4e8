"""Fine-tune diffusion transformers on images and videos of every size and length, at their own shape.

The names here need numpy alone, but for `load_source`, which loads datasets when it is asked for. What needs torch,
datasets, accelerate or diffusers is imported from its room: `hf_bucketing.columns`, `.loading`, `.packing`, `.losses`
and `.training`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .buckets.assignment import Assignment, AssignmentRule, Rejection
from .buckets.cost import CostModel
from .buckets.ladders import novelai_ladder, token_ladder
from .buckets.open_table import ImageSizes, OpenTable, open_table
from .buckets.sizes import CropBox, LatentSpec, Size, cover_resize, crop_box
from .buckets.table import BucketTable
from .errors import BucketingError, CacheError, ColumnError, MediaError, PackingError, PlanError

if TYPE_CHECKING:
    from .columns.sources import load_source as load_source

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

_LAZY = {"load_source": ".mapping"}
"""Names that need more than numpy, and the room of each; not in `__all__`, so that `import *` stays light."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
