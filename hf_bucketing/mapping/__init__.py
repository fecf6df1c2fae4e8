"""`Dataset.map` callables that compute columns from metadata, and `map_columns`, which applies them."""

from .apply import map_columns
from .columns import BucketColumns
from .latents import LatentColumns
from .load import MediaDataset, load_media_dataset
from .metadata import ExistingMetadata, MediaMetadata
from .prepared import CacheInfo, PreparedDataset
from .texts import TextColumns

__all__ = [
    "BucketColumns",
    "CacheInfo",
    "ExistingMetadata",
    "LatentColumns",
    "MediaDataset",
    "MediaMetadata",
    "PreparedDataset",
    "TextColumns",
    "load_media_dataset",
    "map_columns",
]
