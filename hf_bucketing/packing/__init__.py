"""Run samples of different sizes as one packed sequence through a stock diffusers transformer."""

from .attention.dispatch import packed_attention
from .context import active_layout, use_layout
from .layout import PackedLayout
from .losses import packed_mse
from .pack import PackedBatch, Packing, packed_forward
from .processors.attn import PackedAttnProcessor
from .processors.joint import PackedJointAttnProcessor
from .segments import SegmentSpans
from .token_drop import BetaRate, TokenDrop

__all__ = [
    "BetaRate",
    "PackedAttnProcessor",
    "PackedBatch",
    "PackedJointAttnProcessor",
    "PackedLayout",
    "Packing",
    "SegmentSpans",
    "TokenDrop",
    "active_layout",
    "packed_attention",
    "packed_forward",
    "packed_mse",
    "use_layout",
]
