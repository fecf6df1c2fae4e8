"""CogView3-Plus: images, with positions from the corner of one table; text in joint attention.

The pipeline masks no text: pass the embeddings with their padding. Sizes are conditions, as of CogView4.
"""

from __future__ import annotations

from typing import Any

import torch

from ...packing.family import Transformer
from ...packing.names import Grid
from ...packing.processors import PackedJointAttnProcessor
from ...packing.texts import TextTokens
from ..cogview4.packing import CogView4Family
from ..joint import hook_joint_norms
from ..positions import hook_linear_patch_embed


class CogView3PlusFamily(CogView4Family):
    """Packing of `CogView3PlusTransformer2DModel`; see [`CogView4Family`]."""

    transformer_class = "CogView3PlusTransformer2DModel"
    tested_forwards = ("dd8a945669ea",)
    processor_class = PackedJointAttnProcessor
    stock_processors = ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0")
    text = TextTokens(rows="slots", channels="text_embed_dim", padding="encoded_padding")
    attention_kwargs = None

    def limits(self, transformer: Transformer) -> Grid:
        """Return one frame and the sides of the table."""
        side = int(transformer.config.pos_embed_max_size)
        return 1, side, side

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the patch embedding, and the norms, to modulate text by its own sample's timestep and sizes."""
        norms = [block.norm1 for block in transformer.transformer_blocks]
        return [
            hook_linear_patch_embed(transformer.patch_embed, _corner),
            *hook_joint_norms(norms, text_outputs=range(5, 10)),
        ]


def _corner(module: Any, grid: Grid, device: torch.device) -> torch.Tensor:
    _, height, width = grid
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    return (rows[:, None] * module.pos_embed_max_size + columns).flatten()


FAMILY = CogView3PlusFamily()
