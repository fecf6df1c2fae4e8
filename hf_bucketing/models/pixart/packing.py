"""PixArt-α and PixArt-Σ: images; sine-cosine positions; resolution and aspect ratio where trained with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...packing.batch import Rows
from ...packing.family import Draw, Family, Transformer
from ...packing.names import Grid
from ...packing.texts import TextTokens
from ..positions import hook_patch_embed, sincos_table


class PixArtFamily(Family):
    """Packing of `PixArtTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    An image is a sample of one frame. The model itself stretches its positions to `sample_size`.
    """

    transformer_class = "PixArtTransformer2DModel"
    tested_forwards = ("ad3c44bf6904",)
    text = TextTokens(rows="per_strip")
    images_only = True
    latents_as = "images"

    def text_dim(self, transformer: Transformer) -> int:
        """Return the channels of a caption, or of the attention's text where captions are not projected."""
        return int(transformer.config.caption_channels or transformer.config.cross_attention_dim)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the conditions of PixArt-α at 1024 pixels: height and width in pixels, and height ÷ width."""
        if not transformer.use_additional_conditions:
            return {}

        def sides(grids: Sequence[Grid]) -> torch.Tensor:  # eight pixels per latent row and column
            return torch.tensor([[h, w] for _, h, w in grids]) * 8.0 * transformer.config.patch_size

        return {"resolution": sides, "aspect_ratio": lambda grids: sides(grids)[:, :1] / sides(grids)[:, 1:]}

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the patch embedding."""
        return [hook_patch_embed(transformer.pos_embed, sincos_table)]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Add the mask of the text, and pass the conditions of images as one argument."""
        added = {"resolution": None, "aspect_ratio": None, **rows.conditioning}
        inputs = super().inputs(replace(rows, conditioning={}))
        return {**inputs, "encoder_attention_mask": rows.text_mask, "added_cond_kwargs": added}


FAMILY = PixArtFamily()
