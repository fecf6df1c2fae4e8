"""Wan 2.1 and 2.2: rotary positions over frames, rows and columns; text, and images of a first frame, in cross-attention.

Wan attends to the zeros after its text (512 tokens): hand over the embeddings with them, as its pipeline makes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...errors import PackingError
from ..attention import Backend
from ..context import active_layout
from ..layout import Grid
from ..processors import PackedWanAttnProcessor
from ..strips import position_rows
from .base import Family, Transformer

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed


class WanFamily(Family):
    """Recipe of `WanTransformer3DModel`; see [`Family`][hf_bucketing.packing.families.Family]."""

    text_rule = "keep_padding"

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse image-to-video models, and strips longer than the rotary table."""
        if transformer.config.added_kv_proj_dim is not None or transformer.config.image_dim is not None:
            raise PackingError(
                "This Wan transformer also attends to image tokens (image-to-video), which packing does not carry; "
                "use a text-to-video model."
            )
        super().check(transformer, strip_length=strip_length)

    def limits(self, transformer: Transformer) -> Grid:
        """Return the rotary table's length, on each axis."""
        longest = int(transformer.rope.max_seq_len)
        return longest, longest, longest

    def text_dim(self, transformer: Transformer) -> int:
        """Return the configured text channels."""
        return int(transformer.config.text_dim)

    def processor(self, name: str, backend: Backend) -> PackedWanAttnProcessor:
        """Return Wan's."""
        return PackedWanAttnProcessor(backend)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook `rope`."""
        return [transformer.rope.register_forward_hook(_positions)]


def _positions(
    rope: WanRotaryPosEmbed, args: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each sample's own cosines and sines, in strips: two of `(rows, strip_length, 1, head_dim)`."""
    p_t, p_h, p_w = rope.patch_size

    def table(grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
        t, h, w = grid
        shape_only = args[0].new_empty(()).expand(1, 1, t * p_t, h * p_h, w * p_w)
        cosines, sines = rope.forward(shape_only)  # not rope(…), which would come back here
        return cosines[0], sines[0]

    cosines, sines = position_rows(active_layout(), table)
    return cosines, sines
