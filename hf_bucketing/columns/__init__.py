"""Sources of data, and the callables for `Dataset.map` that add columns of sizes and buckets."""

from .apply import map_columns
from .arrays import column_array
from .buckets import BucketColumns
from .captions import CaptionCheck, check_captions
from .conditions import ConditionColumns, check_conditions
from .metadata import ExistingMetadata, MediaMetadata, SizedDataset, add_sizes
from .prepared import CacheInfo, PreparedDataset
from .sources import MediaDataset, load_source

__all__ = [
    "BucketColumns",
    "CacheInfo",
    "CaptionCheck",
    "ConditionColumns",
    "ExistingMetadata",
    "MediaDataset",
    "MediaMetadata",
    "PreparedDataset",
    "SizedDataset",
    "add_sizes",
    "check_captions",
    "check_conditions",
    "column_array",
    "load_source",
    "map_columns",
]
