"""`Dataset.map` callables that compute columns from metadata, and `map_columns`, which applies them."""

from .apply import map_columns
from .captions import CaptionCheck, check_captions
from .columns import BucketColumns
from .latents import LatentColumns
from .load import MediaDataset, load_source
from .metadata import ExistingMetadata, MediaMetadata
from .prepared import CacheInfo, PreparedDataset
from .sizes import SizedDataset, add_sizes
from .texts import TextColumns

__all__ = [
    "BucketColumns",
    "CacheInfo",
    "CaptionCheck",
    "ExistingMetadata",
    "LatentColumns",
    "MediaDataset",
    "MediaMetadata",
    "PreparedDataset",
    "SizedDataset",
    "TextColumns",
    "add_sizes",
    "check_captions",
    "load_source",
    "map_columns",
]
