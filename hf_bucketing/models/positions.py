"""Positions as diffusers computes them: rotary tables of a grid, and those that a `PatchEmbed` adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.hooks import RemovableHandle

from ..packing.context import active_layout
from ..packing.names import Grid
from ..packing.positions import Tables, over_grid
from ..packing.strips import patchify


def rotary_tables(
    dims: Sequence[int],
    axes: Sequence[torch.Tensor],
    *,
    theta: float = 10_000.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, ...]:
    """Return cosines and sines of coordinates `(t,)`, `(h,)` and `(w,)`, side by side: `(t·h·w, Σ dims)` each."""
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    pairs = [
        get_1d_rotary_pos_embed(dim, axis, theta, use_real=True, freqs_dtype=dtype)
        for dim, axis in zip(dims, axes, strict=True)
    ]
    return tuple(torch.cat(over_grid(side), -1) for side in zip(*pairs, strict=True))


def hook_patch_embed(pos_embed: torch.nn.Module, table: Callable[..., torch.Tensor]) -> RemovableHandle:
    """Make a `PatchEmbed` add each sample's own positions, `(t·h·w, dim)`, to its strips; return the handle."""
    tables = Tables(partial(one_table, table))
    return pos_embed.register_forward_hook(partial(_embed_strips, tables))


def one_table(table: Callable[..., torch.Tensor], *key: Any, **options: Any) -> tuple[torch.Tensor]:
    """Return what a function of one table makes, as [`Tables`][hf_bucketing.packing.positions.Tables] keeps it."""
    return (table(*key, **options),)


def _embed_strips(tables: Tables, module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    from ..packing.strip_positions import position_strips

    (positions,) = position_strips(active_layout(), lambda grid: tables(module, grid, output.device))
    tokens = module.proj(args[0]).flatten(2).transpose(1, 2)
    embedded: torch.Tensor = (tokens + positions).to(tokens.dtype)
    return embedded


def hook_linear_patch_embed(pos_embed: torch.nn.Module, index: Callable[..., torch.Tensor]) -> RemovableHandle:
    """Make a module that projects patches by a linear layer add each sample's own positions to its strips.

    Args:
        pos_embed (`torch.nn.Module`): Module with `proj`, `patch_size` and a table `pos_embed`, `(…, dim)`. It is
            called with latents, and returns their tokens, behind those of a text if it is given one.
        index (callable): Returns the rows of the table for a token grid, `(t·h·w,)`, by module, grid and device.

    Returns:
        `RemovableHandle`: Handle of the hook.
    """
    return pos_embed.register_forward_hook(partial(_embed_patches, Tables(partial(one_table, index))))


def _embed_patches(tables: Tables, module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    from ..packing.strip_positions import position_strips

    latents, side = args[0], module.patch_size
    (index,) = position_strips(active_layout(), lambda grid: tables(module, grid, output.device))
    tokens = module.proj(patchify(latents[:, :, None], (1, side, side)).flatten(2))
    embedded = (tokens + F.embedding(index, module.pos_embed.flatten(0, -2))).to(tokens.dtype)
    return torch.cat([output[:, : output.shape[1] - embedded.shape[1]], embedded], 1)


def sincos_table(module: Any, grid: Grid, device: torch.device) -> torch.Tensor:
    """Return the sine-cosine positions that the module adds to each frame of a sample, `(t·h·w, dim)`."""
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    table: torch.Tensor = module.pos_embed[0]  # for its own square
    if grid[1:] != (module.height, module.width):
        made: torch.Tensor = get_2d_sincos_pos_embed(
            table.shape[1],
            grid_size=grid[1:],
            base_size=module.base_size,
            interpolation_scale=module.interpolation_scale,
            device=device,
            output_type="pt",
        )
        table = made.float()
    return table.repeat(grid[0], 1)
