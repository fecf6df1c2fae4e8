"""Sine-cosine positions that diffusers' `PatchEmbed` adds: Latte, PixArt."""

from __future__ import annotations

from typing import Any

import torch

from .context import active_layout
from .layout import Grid
from .strips import position_rows


def hook_patch_embed(pos_embed: torch.nn.Module) -> Any:
    """Make a `PatchEmbed` add each sample's own positions to its strips; return the hook's handle."""
    return pos_embed.register_forward_hook(_embed_strips)


def _embed_strips(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    def table(grid: Grid) -> tuple[torch.Tensor]:
        return (_sincos(module, grid, output.device).repeat(grid[0], 1),)

    (positions,) = position_rows(active_layout(), table)
    tokens = module.proj(args[0]).flatten(2).transpose(1, 2)
    embedded: torch.Tensor = (tokens + positions).to(tokens.dtype)
    return embedded


def _sincos(module: Any, grid: Grid, device: torch.device) -> torch.Tensor:
    """Return what the module adds to an image of that grid, `(h·w, dim)`: it has its own square at hand as a table."""
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    own: torch.Tensor = module.pos_embed[0]
    if grid[1:] == (module.height, module.width):
        return own
    table: torch.Tensor = get_2d_sincos_pos_embed(
        own.shape[1],
        grid_size=grid[1:],
        base_size=module.base_size,
        interpolation_scale=module.interpolation_scale,
        device=device,
        output_type="pt",
    )
    return table.float()
