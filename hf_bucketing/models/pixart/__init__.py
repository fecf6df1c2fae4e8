"""PixArt-α and PixArt-Σ: images; sine-cosine positions; resolution and aspect ratio where trained with them."""

from .packing import FAMILY, PixArtFamily

__all__ = ["FAMILY", "PixArtFamily"]
