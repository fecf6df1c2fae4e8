"""Latents and texts on disk: keys, entries, the job that encodes them and the collator that reads them."""

from .collator import CachedCollator
from .columns import CacheConfig, LatentColumns, TextColumns
from .fingerprints import Encoder
from .job import cache_dataset

__all__ = ["CacheConfig", "CachedCollator", "Encoder", "LatentColumns", "TextColumns", "cache_dataset"]
