from .collator import CachedCollator as CachedCollator
from .columns import LatentColumns as LatentColumns, TextColumns as TextColumns
from .fingerprints import Encoder as Encoder
from .job import cache_dataset as cache_dataset
from .settings import CacheConfig as CacheConfig
