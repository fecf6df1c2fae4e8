"""`Dataset.map` callables that compute columns from metadata, and `map_columns`, which applies them."""

from .apply import map_columns
from .columns import BucketColumns
from .load import MediaDataset, load_media_dataset
from .metadata import ExistingMetadata, MediaMetadata
from .prepared import PreparedDataset

__all__ = [
    "BucketColumns",
    "ExistingMetadata",
    "MediaDataset",
    "MediaMetadata",
    "PreparedDataset",
    "load_media_dataset",
    "map_columns",
]
