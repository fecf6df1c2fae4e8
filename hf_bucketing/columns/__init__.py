"""Sources of data and the columns that `Dataset.map` callables compute."""

from .apply import map_columns
from .buckets import BucketColumns
from .metadata import ExistingMetadata, MediaMetadata
from .prepared import CacheInfo, PreparedDataset
from .sources import MediaDataset, load_media_dataset

__all__ = [
    "BucketColumns",
    "CacheInfo",
    "ExistingMetadata",
    "MediaDataset",
    "MediaMetadata",
    "PreparedDataset",
    "load_media_dataset",
    "map_columns",
]
