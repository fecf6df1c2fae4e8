"""Allegro: rotary positions over frames, rows and columns, made by its pipeline."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed

from ..errors import PackingError
from ..packing.batch import Rows
from ..packing.family import Family, Transformer
from ..packing.layout import Grid
from ..packing.positions import axis_coordinates, hook_rotary, over_grid


class AllegroFamily(Family):
    """Packing of `AllegroTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "AllegroTransformer3DModel"
    interpolates = True
    text_by_strip = True

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse strips of one token, because the model's blocks squeeze an axis of one token away."""
        if strip_length == 1:
            raise PackingError("Allegro's blocks do not run strips of one token; use a strip_length of at least 2.")

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Pass the transformer the rotary tables that its pipeline would pass."""

        def table(module: Any, grid: Grid, device: torch.device) -> tuple[torch.Tensor, ...]:
            return _rotary(module.config, grid, base_size, device=device)

        return [hook_rotary(transformer, table)]

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the pipeline's rotary tables: one per axis, and where each token looks it up."""
        config, device = transformer.config, rows.latents.device
        axes = axis_coordinates(rows.grid, None, device=device)
        tables = [_axis_rotary(config, axis, scale) for axis, scale in zip(axes, _scales(config), strict=True)]
        positions = over_grid([torch.arange(count, device=device) for count in rows.grid])
        return {"image_rotary_emb": (tables, [axis[None] for axis in positions])}


def _scales(config: Any) -> tuple[float, float, float]:
    return config.interpolation_scale_t, config.interpolation_scale_h, config.interpolation_scale_w


def _axis_rotary(config: Any, coordinates: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of one axis, `(count, head_dim / 3)` each."""
    dim = config.attention_head_dim // 3
    cosines, sines = get_1d_rotary_pos_embed(dim, coordinates / scale, use_real=True, repeat_interleave_real=False)
    return cosines, sines


def _rotary(config: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return cosines and sines of frames, of rows, and of columns for each token: six of `(t·h·w, head_dim / 3)`."""
    axes = axis_coordinates(grid, base_size, device=device)
    pairs = [_axis_rotary(config, axis, scale) for axis, scale in zip(axes, _scales(config), strict=True)]
    cosines, sines = (over_grid(side) for side in zip(*pairs, strict=True))
    return tuple(table for pair in zip(cosines, sines, strict=True) for table in pair)


FAMILY = AllegroFamily()
