"""Where CogVideoX places tokens: rotary positions as its pipelines compute them, sincos ones as the model does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.embeddings import (
    get_1d_rotary_pos_embed,
    get_1d_sincos_pos_embed_from_grid,
    get_3d_rotary_pos_embed,
)

from ..layout import Grid
from ..positions import axis_coordinates, over_grid
from .base import Transformer

if TYPE_CHECKING:
    from diffusers.models.embeddings import CogVideoXPatchEmbed


def base_grid(transformer: Transformer) -> tuple[int, int]:
    """Return rows and columns of tokens of the size that the model is configured for."""
    config = transformer.config
    return config.sample_height // config.patch_size, config.sample_width // config.patch_size


def rotary_table(
    transformer: Transformer, grid: Grid, base_size: Grid | None, *, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    """Return cosines and sines of a sample, `(t·h·w, head_dim)` each."""
    dim, whole = transformer.config.attention_head_dim, base_grid(transformer)
    if base_size is not None:
        axes = list(axis_coordinates(grid, base_size, device=device))
        if transformer.config.patch_size_t is None:
            corners = zip(*centred(*base_size[1:], whole=whole), strict=True)
            for axis, (start, stop) in enumerate(corners, start=1):
                last = max(base_size[axis] - 1, 1)  # the base's own tokens lie between start and stop·last/(last + 1)
                axes[axis] = start + axes[axis] * (stop * last / (last + 1) - start) / last
        pairs = [
            get_1d_rotary_pos_embed(part, axis, use_real=True)
            for part, axis in zip((dim // 4, dim // 8 * 3, dim // 8 * 3), axes, strict=True)
        ]
        return tuple(torch.cat(over_grid(side), -1) for side in zip(*pairs, strict=True))
    frames, height, width = grid
    places: dict[str, Any] = {"crops_coords": centred(height, width, whole=whole)}
    if transformer.config.patch_size_t is not None:
        places = {"crops_coords": None, "grid_type": "slice", "max_size": whole}
    cosines, sines = get_3d_rotary_pos_embed(
        embed_dim=dim, grid_size=(height, width), temporal_size=frames, device=device, **places
    )
    return cosines, sines


def centred(height: int, width: int, *, whole: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the corners of a grid scaled to fit into the middle of the whole, as CogVideoX 1.0 places it."""
    scale = min(whole[0] / height, whole[1] / width)
    fitted = round(scale * height), round(scale * width)
    top, left = (round((side - part) / 2.0) for side, part in zip(whole, fitted, strict=True))
    return (top, left), (top + fitted[0], left + fitted[1])


def sincos_table(embed: CogVideoXPatchEmbed, grid: Grid, base_size: Grid | None, device: torch.device) -> torch.Tensor:
    """Return what the patch embedding adds to the tokens of a sample, `(t·h·w, dim)`."""
    if base_size is not None:
        scales = (embed.temporal_interpolation_scale, *[embed.spatial_interpolation_scale] * 2)
        dims = (embed.embed_dim // 4, *[3 * embed.embed_dim // 8] * 2)
        axes = axis_coordinates(grid, base_size, device=device)
        of_frames, of_rows, of_columns = over_grid(
            [
                get_1d_sincos_pos_embed_from_grid(dim, axis / scale, output_type="pt")
                for dim, axis, scale in zip(dims, axes, scales, strict=True)
            ]
        )
        return torch.cat([of_frames, of_columns, of_rows], -1)
    height, width = grid[1] * embed.patch_size, grid[2] * embed.patch_size
    frames = (grid[0] - 1) * embed.temporal_compression_ratio + 1
    joint: torch.Tensor = embed.pos_embedding
    if (height, width, frames) != (embed.sample_height, embed.sample_width, embed.sample_frames):
        joint = embed._get_positional_embeddings(height, width, frames, device=device)
    return joint[0, embed.max_text_seq_length :]
