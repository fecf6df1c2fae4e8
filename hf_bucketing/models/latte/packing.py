"""How Latte is packed: sine-cosine positions; blocks attend inside frames and over frames in turn.

The stock model runs images and videos of exactly `video_length` frames; packed, it runs any number up to that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.embeddings import get_1d_sincos_pos_embed_from_grid

from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import UNLIMITED, Family, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Backend, Grid
from ...packing.positions import axis_coordinates
from ...packing.processors import PackedAttnProcessor
from ...packing.strip_positions import position_strips
from ..positions import hook_patch_embed, sincos_table


class LatteFamily(Family):
    """Packing of `LatteTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    The model itself stretches rows and columns to `sample_size`, whatever their number, so a sample stretched to a
    base size has the rows and columns that it has anyway; the frames of a base size stretch those of the samples.
    """

    transformer_class = "LatteTransformer3DModel"
    tested_forwards = ("d33f1c214b4c",)
    interpolates = True

    def limits(self, transformer: Transformer) -> Grid:
        """Return the frames that the model has positions for."""
        return int(transformer.config.video_length), UNLIMITED, UNLIMITED

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Refuse also samples without some of their tokens: attention over frames needs the token of every frame."""
        super().check_layout(transformer, layout, stretched=stretched)
        if layout.kept is not None:
            name = type(transformer).__name__
            raise PackingError(f"{name} does more than attention across tokens; pack it without token_drop.")

    def processor(self, name: str, backend: Backend) -> PackedAttnProcessor:
        """Attend inside frames, or over frames in the temporal blocks."""
        return PackedAttnProcessor(backend, scope="spatial_position" if name.startswith("temporal") else "frame")

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the patch embedding, and the first temporal block, whose input gets the positions of frames."""
        first, add_frames = transformer.temporal_transformer_blocks[0], partial(_add_frames, transformer, base_size)
        return [hook_patch_embed(transformer.pos_embed, sincos_table), first.register_forward_pre_hook(add_frames)]

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the bias of padded text for every frame: the model repeats the text itself, but not its mask."""
        if rows.text_mask is None:
            return {}
        bias = (1 - rows.text_mask[:, None].to(rows.latents.dtype)) * -10_000.0
        return {"encoder_attention_mask": bias.repeat_interleave(rows.latents.shape[2], dim=0)}

    def run(self, transformer: Transformer, rows: Rows, *, wrapped: Any = None) -> torch.Tensor:
        """Run samples of one size, with as many of the model's positions as they have frames."""
        table = transformer.temp_pos_embed
        transformer.temp_pos_embed = table[:, : rows.latents.shape[2]]
        try:
            return super().run(transformer, rows, wrapped=wrapped)
        finally:
            transformer.temp_pos_embed = table


def _add_frames(
    transformer: Transformer, base_size: Grid | None, block: torch.nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    hidden_states, *rest = args  # (tokens, 1, dim)
    (positions,) = position_strips(active_layout(), lambda grid: (_frames(transformer, grid, base_size),))
    return hidden_states + positions.flatten(0, 1)[:, None].to(hidden_states.dtype), *rest


def _frames(transformer: Transformer, grid: Grid, base_size: Grid | None) -> torch.Tensor:
    """Return the positions of a sample's frames for each of its tokens, `(t·h·w, dim)`: zero for an image."""
    t, h, w = grid
    table: torch.Tensor = transformer.temp_pos_embed[0]
    if t == 1:
        positions = torch.zeros_like(table[:1])
    elif base_size is None:
        positions = table[:t]
    else:
        frames, _, _ = axis_coordinates(grid, base_size, device=table.device)
        positions = get_1d_sincos_pos_embed_from_grid(table.shape[1], frames, output_type="pt").to(table.dtype)
    return positions.repeat_interleave(h * w, 0)


FAMILY = LatteFamily()
