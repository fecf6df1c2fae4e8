"""Attention processors that run a pack, one per way of attending, named as diffusers names its own."""

from .joint import PackedJointAttnProcessor
from .wan import PackedWanAttnProcessor

__all__ = ["PackedJointAttnProcessor", "PackedWanAttnProcessor"]
