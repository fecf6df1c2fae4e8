"""Run samples of different sizes as one packed sequence through a stock diffusers transformer.

No model family is known here; those are in `hf_bucketing.models`, with `enable_packing`.
"""

from .attention.dispatch import packed_attention
from .batch import PackedBatch
from .context import active_layout, use_layout
from .layout import PackedLayout
from .losses import packed_mse, packed_vlb
from .pack import Packing, packed_forward
from .processors import PackedAttnProcessor, PackedJointAttnProcessor
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
    "packed_vlb",
    "use_layout",
]
