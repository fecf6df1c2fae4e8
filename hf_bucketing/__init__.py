"""Fine-tune diffusion transformers on images and videos of every size and length, at their own shape.

Everything that the README's examples use is importable from here. Sizes, bucket tables and plans need numpy alone; the
other names are loaded with torch, datasets, accelerate or diffusers when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .buckets import (
    Assignment,
    AssignmentRule,
    BucketTable,
    CostModel,
    CropBox,
    ImageSizes,
    LatentSpec,
    OpenTable,
    Rejection,
    Size,
    cover_resize,
    crop_box,
    novelai_ladder,
    open_table,
    token_ladder,
)
from .errors import BucketingError, CacheError, ColumnError, MediaError, PackingError, PlanError

if TYPE_CHECKING:
    from .columns import BucketColumns, ExistingMetadata, MediaMetadata, load_source, map_columns
    from .loaders import (
        BucketBatchSampler,
        BucketCollator,
        LengthBatchSampler,
        PackBatchSampler,
        PackCollator,
        PadCollator,
        check_loader,
        resume,
        worker_options,
    )
    from .losses import global_mean, masked_mse, masked_snr
    from .media import ViewRule
    from .models import disable_packing, enable_packing, verify_packing
    from .packing import PackedLayout, TokenDrop, packed_forward, packed_mse, packed_vlb
    from .streaming import StreamingBucketBatcher

__version__ = "0.1.0.dev0"

_LAZY = {
    "columns": ("BucketColumns", "ExistingMetadata", "MediaMetadata", "load_source", "map_columns"),
    "loaders": (
        "BucketBatchSampler",
        "BucketCollator",
        "LengthBatchSampler",
        "PackBatchSampler",
        "PackCollator",
        "PadCollator",
        "check_loader",
        "resume",
        "worker_options",
    ),
    "losses": ("global_mean", "masked_mse", "masked_snr"),
    "media": ("ViewRule",),
    "models": ("disable_packing", "enable_packing", "verify_packing"),
    "packing": ("PackedLayout", "TokenDrop", "packed_forward", "packed_mse", "packed_vlb"),
    "streaming": ("StreamingBucketBatcher",),
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [
    "Assignment",
    "AssignmentRule",
    "BucketBatchSampler",
    "BucketCollator",
    "BucketColumns",
    "BucketTable",
    "BucketingError",
    "CacheError",
    "ColumnError",
    "CostModel",
    "CropBox",
    "ExistingMetadata",
    "ImageSizes",
    "LatentSpec",
    "LengthBatchSampler",
    "MediaError",
    "MediaMetadata",
    "OpenTable",
    "PackBatchSampler",
    "PackCollator",
    "PackedLayout",
    "PackingError",
    "PadCollator",
    "PlanError",
    "Rejection",
    "Size",
    "StreamingBucketBatcher",
    "TokenDrop",
    "ViewRule",
    "check_loader",
    "cover_resize",
    "crop_box",
    "disable_packing",
    "enable_packing",
    "global_mean",
    "load_source",
    "map_columns",
    "masked_mse",
    "masked_snr",
    "novelai_ladder",
    "open_table",
    "packed_forward",
    "packed_mse",
    "packed_vlb",
    "resume",
    "token_ladder",
    "verify_packing",
    "worker_options",
]


def __getattr__(name: str) -> Any:
    """Import a name that needs more than numpy when it is first used (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
