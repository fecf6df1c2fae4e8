"""Sources of data and the columns that `Dataset.map` callables compute."""

from .apply import map_columns
from .buckets import BucketColumns
from .captions import CaptionCheck, check_captions
from .metadata import ExistingMetadata, MediaMetadata
from .prepared import CacheInfo, PreparedDataset
from .sizes import SizedDataset, add_sizes
from .sources import MediaDataset, load_source

__all__ = [
    "BucketColumns",
    "CacheInfo",
    "CaptionCheck",
    "ExistingMetadata",
    "MediaDataset",
    "MediaMetadata",
    "PreparedDataset",
    "SizedDataset",
    "add_sizes",
    "check_captions",
    "load_source",
    "map_columns",
]
