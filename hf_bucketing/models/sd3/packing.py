"""Stable Diffusion 3 and 3.5: images, with positions cropped from the middle of one table; text in joint attention.

The pipeline masks no text: pass the embeddings with their padding, as the pipeline makes them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...errors import PackingError
from ...packing.family import Transformer
from ...packing.names import Grid
from ...packing.positions import axis_coordinates
from ...packing.texts import TextTokens
from ..joint import JointFamily, hook_text_modulation
from ..positions import hook_patch_embed

if TYPE_CHECKING:
    from diffusers.models.embeddings import PatchEmbed


class SD3Family(JointFamily):
    """Packing of `SD3Transformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "SD3Transformer2DModel"
    tested_forwards = ("ace020eb0242", "124eca013df2")
    stock_processors = ("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0", "XFormersJointAttnProcessor")
    text = TextTokens(rows="slots", channels="joint_attention_dim", padding="encoded_padding")
    interpolates = True
    images_only = True
    latents_as = "images"
    attention_kwargs = "joint_attention_kwargs"
    original_names = (("transformer_blocks.**", "transformer_blocks.**"),)  # ComfyUI takes the names of diffusers
    original_prefix = "transformer."

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models without a table of positions, and models whose fused projections skip a norm."""
        if transformer.config.pos_embed_max_size is None:
            raise PackingError("Packing needs an SD3 transformer with a table of positions (pos_embed_max_size).")
        if transformer.config.qk_norm is not None and transformer.transformer_blocks[0].attn.fused_projections:
            raise PackingError(
                "diffusers' fused SD3 attention skips the norms of queries and keys that this model has; load the "
                "transformer again and leave its projections apart."
            )
        super().check(transformer, strip_length=strip_length)

    def limits(self, transformer: Transformer) -> Grid:
        """Return one frame and the table's sides; the stock embedding looks strips up there before the hook runs."""
        side = int(transformer.pos_embed.pos_embed_max_size)
        return 1, side, side

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the patch embedding, and the norms of text, to modulate it by its own sample's timestep."""
        table = hook_patch_embed(transformer.pos_embed, partial(_table, base_size=base_size))
        return [table, *hook_text_modulation(transformer)]


def _table(embed: PatchEmbed, grid: Grid, device: torch.device, *, base_size: Grid | None) -> torch.Tensor:
    """Return a sample's positions, `(h·w, dim)`: the middle of the table, interpolated if there is a base size."""
    _, height, width = base_size or grid
    middle: torch.Tensor = embed.cropped_pos_embed(height * embed.patch_size, width * embed.patch_size)[0]
    if base_size is None:
        return middle
    table = middle.unflatten(0, (height, width))
    for axis, coordinates in enumerate(axis_coordinates(grid, base_size, device=table.device)[1:]):
        table = _interpolate(table, coordinates, axis)
    return table.flatten(0, 1)


def _interpolate(table: torch.Tensor, coordinates: torch.Tensor, axis: int) -> torch.Tensor:
    """Interpolate a table linearly at fractional coordinates of an axis; its last entry continues beyond the end."""
    last = table.shape[axis] - 1
    below = coordinates.long().clamp(max=last)
    share = (coordinates - below).to(table.dtype).view(-1, *[1] * (table.ndim - 1 - axis))
    return table.index_select(axis, below).lerp(table.index_select(axis, (below + 1).clamp(max=last)), share)


FAMILY = SD3Family()
