"""EasyAnimate 5.1: video, at positions stretched over those of 480p; text in joint attention.

The forward has no mask for text, so the model attends to all text that it gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...devices import to_device
from ...errors import PackingError
from ...packing.family import Transformer
from ...packing.names import Grid
from ...packing.positions import shape_only
from ...packing.processors import Rotary
from ...packing.texts import TextTokens
from ..joint import JointFamily, hook_joint_norms

TEXT_LENGTH = 256
"""Tokens of a text, with its padding, in every call of the pipeline."""


class EasyAnimateFamily(JointFamily):
    """Packing of `EasyAnimateTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "EasyAnimateTransformer3DModel"
    tested_forwards = ("7422f85b7474",)
    stock_processors = ("EasyAnimateAttnProcessor2_0",)
    text = TextTokens(rows="slots", channels="text_embed_dim", padding="encoded_padding")
    strips_have_positions = False
    position_module = "rope_embedding"

    def text_length(self, config: Mapping[str, Any]) -> int:
        """Return the tokens to which the pipeline pads a text."""
        return TEXT_LENGTH

    def unused(self, transformer: Transformer) -> Sequence[str]:
        """Return what the last block does with the text after attention."""
        last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}."
        return f"{last}attn1.to_add_out", f"{last}txt_ff"

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse blocks in which tokens and text share projections, texts of two encoders, and further channels."""
        config = transformer.config
        if config.mmdit_layers < config.num_layers or config.text_embed_dim_t5 is not None:
            raise PackingError(
                "Packing knows EasyAnimate transformers whose blocks all have projections of their own for text "
                f"(mmdit_layers of at least num_layers) and that read one text (no text_embed_dim_t5); this one has "
                f"mmdit_layers={config.mmdit_layers}, num_layers={config.num_layers} and "
                f"text_embed_dim_t5={config.text_embed_dim_t5}. Train it with bucketed batches."
            )
        if config.in_channels != config.out_channels:
            raise PackingError(
                f"The forward of EasyAnimate makes as many channels as its latents have, {config.out_channels}, and "
                f"this transformer takes {config.in_channels}: it is for inpainting or controls, whose latents come "
                "in an argument of their own. Use the text-to-video model, or train this one with bucketed batches."
            )
        super().check(transformer, strip_length=strip_length)

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the tables as `rope_embedding` computes them."""
        latent = shape_only(torch.empty(()), grid, (1, module.patch_size, module.patch_size))
        # module.forward instead of module(…), which would call the hook again
        return tuple(to_device(table, device) for table in module.forward(latent))

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the norms, to modulate text by its own sample's timestep."""
        norms = [norm for block in transformer.transformer_blocks for norm in (block.norm1, block.norm2)]
        return [*super().hook_positions(transformer, base_size), *hook_joint_norms(norms, text_outputs=(1, 3))]


FAMILY = EasyAnimateFamily()
