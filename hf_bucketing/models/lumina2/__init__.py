"""Lumina 2: rotary positions of the text and, after it, of the image; refiners of both; flow matching."""

from .packing import FAMILY, Lumina2Family, PackedLumina2AttnProcessor

__all__ = ["FAMILY", "Lumina2Family", "PackedLumina2AttnProcessor"]
