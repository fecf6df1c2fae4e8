"""Sources of data, and the callables for `Dataset.map` that add columns of sizes and buckets."""

from .apply import map_columns
from .arrays import column_array
from .buckets import BucketColumns
from .captions import CaptionCheck, CaptionTexts, check_captions
from .clips import ClipRows, ClipRule, cut_clips
from .conditions import ConditionColumns, check_conditions
from .metadata import ExistingMetadata, MediaMetadata, SizedDataset, add_sizes
from .prepared import CacheInfo, PreparedDataset
from .sources import MediaDataset, load_source
from .trainer_toml import TomlSources, load_toml

__all__ = [
    "BucketColumns",
    "CacheInfo",
    "CaptionCheck",
    "CaptionTexts",
    "ClipRows",
    "ClipRule",
    "ConditionColumns",
    "ExistingMetadata",
    "MediaDataset",
    "MediaMetadata",
    "PreparedDataset",
    "SizedDataset",
    "TomlSources",
    "add_sizes",
    "check_captions",
    "check_conditions",
    "column_array",
    "cut_clips",
    "load_source",
    "load_toml",
    "map_columns",
]
