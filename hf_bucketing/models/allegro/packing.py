"""Allegro: rotary positions over frames, rows and columns, made by its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed

from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.family import Family, Transformer
from ...packing.names import Grid
from ...packing.positions import axis_coordinates, over_grid
from ...packing.processors import Rotary
from ...packing.texts import TextTokens


class AllegroFamily(Family):
    """Packing of `AllegroTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "AllegroTransformer3DModel"
    tested_forwards = ("943ba9381dfe",)
    stock_processors = ("AllegroAttnProcessor2_0",)
    interpolates = True
    text = TextTokens(rows="per_strip")

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse strips of one token, because the model's blocks squeeze an axis of one token away."""
        if strip_length == 1:
            raise PackingError("Allegro's blocks do not run strips of one token; use a strip_length of at least 2.")

    def trial_grids(self, transformer: Transformer) -> list[Grid]:
        """Return no grid of one token, which the stock model cannot run: its blocks squeeze that axis away."""
        return [(1, 1, 2) if grid == (1, 1, 1) else grid for grid in super().trial_grids(transformer)]

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the tables of frames, rows and columns that its pipeline would pass, a third of a head's each."""
        axes = axis_coordinates(grid, base_size, device=device)
        cosines, sines = (over_grid(side) for side in zip(*_axis_tables(module.config, axes), strict=True))
        return tuple(table for pair in zip(cosines, sines, strict=True) for table in pair)

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the pipeline's rotary tables: one per axis, and where each token looks it up."""
        config, device = transformer.config, rows.latents.device
        tables = _axis_tables(config, axis_coordinates(rows.grid, None, device=device))
        positions = over_grid([torch.arange(count, device=device) for count in rows.grid])
        return {"image_rotary_emb": (tables, [axis[None] for axis in positions])}


def _axis_tables(config: Any, axes: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Return cosines and sines of each axis, `(count, head_dim / 3)` each."""
    scales = config.interpolation_scale_t, config.interpolation_scale_h, config.interpolation_scale_w
    dim = config.attention_head_dim // 3
    return [
        get_1d_rotary_pos_embed(dim, axis / scale, use_real=True, repeat_interleave_real=False)
        for axis, scale in zip(axes, scales, strict=True)
    ]


FAMILY = AllegroFamily()
