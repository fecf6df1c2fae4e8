from .apply import map_columns as map_columns
from .arrays import column_array as column_array
from .buckets import BucketColumns as BucketColumns
from .captions import CaptionCheck as CaptionCheck, CaptionTexts as CaptionTexts, check_captions as check_captions
from .clips import ClipRows as ClipRows, cut_clips as cut_clips
from .conditions import ConditionColumns as ConditionColumns, check_conditions as check_conditions
from .metadata import (
    ExistingMetadata as ExistingMetadata,
    MediaMetadata as MediaMetadata,
    SizedDataset as SizedDataset,
    add_sizes as add_sizes,
)
from .prepared import CacheInfo as CacheInfo, PreparedDataset as PreparedDataset
from .settings import ClipRule as ClipRule
from .sources import MediaDataset as MediaDataset, load_source as load_source
from .trainer_toml import TomlSources as TomlSources, load_toml as load_toml
