"""LTX-2: the video stream of an audio-video model, with its audio isolated; flow matching, shifted by size."""

from .packing import FAMILY, LTX2Family, PackedLTX2AttnProcessor

__all__ = ["FAMILY", "LTX2Family", "PackedLTX2AttnProcessor"]
