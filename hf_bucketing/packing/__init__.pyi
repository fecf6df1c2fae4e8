from .attention.dispatch import packed_attention as packed_attention
from .audio import Audio as Audio
from .batch import PackedBatch as PackedBatch
from .context import active_layout as active_layout, use_layout as use_layout
from .forward import (
    packed_forward as packed_forward,
    packed_forward_with_audio as packed_forward_with_audio,
)
from .layout import PackedLayout as PackedLayout
from .losses import packed_mse as packed_mse, packed_vlb as packed_vlb
from .pack import Packing as Packing
from .processors import (
    PackedAttnProcessor as PackedAttnProcessor,
    PackedJointAttnProcessor as PackedJointAttnProcessor,
)
from .segments import SegmentSpans as SegmentSpans
from .token_drop import BetaRate as BetaRate, TokenDrop as TokenDrop
