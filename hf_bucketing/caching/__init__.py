"""Latents and texts on disk: keys, entries, the job that encodes them and the collator that reads them."""

from .collator import CachedCollator
from .latents import LatentColumns
from .texts import TextColumns

__all__ = ["CachedCollator", "LatentColumns", "TextColumns"]
