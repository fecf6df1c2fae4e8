"""Mochi: learned rotary frequencies; text pooled by attention, and in joint attention in a width of its own."""

from .packing import FAMILY, MochiFamily, PackedMochiAttnProcessor

__all__ = ["FAMILY", "MochiFamily", "PackedMochiAttnProcessor"]
