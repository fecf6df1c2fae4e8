"""Attention processors that run a pack, one per way of attending, named as diffusers names its own."""

from .attn import PackedAttnProcessor
from .joint import PackedJointAttnProcessor
from .ltx import PackedLTXVideoAttnProcessor
from .wan import PackedWanAttnProcessor

__all__ = [
    "PackedAttnProcessor",
    "PackedJointAttnProcessor",
    "PackedLTXVideoAttnProcessor",
    "PackedWanAttnProcessor",
]
