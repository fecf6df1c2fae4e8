"""AuraFlow: images, with positions from the middle of a learned table; text and registers in joint attention.

The pipeline attends to padding as zeros: pass the embeddings with it. The model puts registers, tokens of its own, in
front of each batch row's text; in a pack they are part of each sample's text.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Grid
from ...packing.texts import TextTokens
from ..joint import JointFamily, hook_row_modulation, hook_text_norms
from ..positions import hook_linear_patch_embed


class AuraFlowFamily(JointFamily):
    """Packing of `AuraFlowTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "AuraFlowTransformer2DModel"
    tested_forwards = ("5a0d6341597a",)
    stock_processors = ("AuraFlowAttnProcessor2_0", "FusedAuraFlowAttnProcessor2_0")
    text = TextTokens(rows="per_sample", channels="joint_attention_dim", padding="keep_padding")
    images_only = True
    latents_as = "images"
    attention_kwargs = "attention_kwargs"

    def limits(self, transformer: Transformer) -> Grid:
        """Return one frame and the sides of the table."""
        side = math.isqrt(transformer.config.pos_embed_max_size)
        return 1, side, side

    def fit_text(
        self, transformer: Transformer, layout: PackedLayout, *, pad_to: int | None, pad_text_to: int | None
    ) -> tuple[PackedLayout, int | None]:
        """Count the registers with each text."""
        layout = replace(layout, added_lengths=(transformer.register_tokens.shape[1],) * len(layout))
        return super().fit_text(transformer, layout, pad_to=pad_to, pad_text_to=pad_text_to)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the patch embedding, the text of the first block, and the norms."""
        joint, single = transformer.joint_transformer_blocks, transformer.single_transformer_blocks
        return [
            hook_linear_patch_embed(transformer.pos_embed, _middle),
            joint[0].register_forward_pre_hook(_fill_slots, with_kwargs=True),
            *hook_text_norms(block.norm1_context for block in joint),
            *hook_row_modulation([block.norm1 for block in single], text_first=True),
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return timesteps from 0 to 1, as the pipeline passes them."""
        return {**super().inputs(rows), "timestep": rows.timesteps / 1000}


def _middle(module: Any, grid: Grid, device: torch.device) -> torch.Tensor:
    _, height, width = grid
    index: torch.Tensor = module.pe_selection_index_based_on_dim(height * module.patch_size, width * module.patch_size)
    return index


@torch.compiler.disable  # loops over the texts of the pack, as position_strips does over its samples
def _fill_slots(block: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Put the registers and the text of each sample, `(n, length, dim)`, into the text slots of its strips."""
    tokens, texts, *rest = list(args) + list(kwargs.values())
    layout = active_layout()
    samples = [text[:length] for text, length in zip(texts, layout.joint_text_lengths, strict=True)]
    return (tokens, layout.joint.fill_slots(torch.cat(samples)), *rest), {}


FAMILY = AuraFlowFamily()
