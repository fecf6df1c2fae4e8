"""Run samples of different sizes as one packed sequence through a stock diffusers transformer."""

from .attention import packed_attention
from .context import active_layout, use_layout
from .enable import disable_packing, enable_packing
from .layout import PackedLayout
from .pack import PackedBatch, Packing, packed_forward
from .processors import (
    PackedAttnProcessor,
    PackedJointAttnProcessor,
    PackedLTXVideoAttnProcessor,
    PackedWanAttnProcessor,
)
from .segments import SegmentSpans
from .token_drop import BetaRate, TokenDrop
from .verify import VerificationCheck, VerificationReport, verify_packing

__all__ = [
    "BetaRate",
    "PackedAttnProcessor",
    "PackedBatch",
    "PackedJointAttnProcessor",
    "PackedLTXVideoAttnProcessor",
    "PackedLayout",
    "PackedWanAttnProcessor",
    "Packing",
    "SegmentSpans",
    "TokenDrop",
    "VerificationCheck",
    "VerificationReport",
    "active_layout",
    "disable_packing",
    "enable_packing",
    "packed_attention",
    "packed_forward",
    "use_layout",
    "verify_packing",
]
