"""Kandinsky 5: text refined by blocks of its own, then attended to; positions scaled by size; flow matching."""

from .packing import FAMILY, Kandinsky5Family, PackedKandinsky5AttnProcessor

__all__ = ["FAMILY", "Kandinsky5Family", "PackedKandinsky5AttnProcessor"]
