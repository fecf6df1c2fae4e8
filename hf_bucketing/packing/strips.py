"""Latents to strips and back.

C channels, F latent frames, H and W latent rows and columns, L tokens, R strips (batch rows), S strip_length;
p_t, p_h, p_w are the sides of a patch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ..errors import PackingError
from .layout import Grid, PackedLayout


def token_grid(latent: torch.Tensor, patch: Grid, *, sample: int) -> Grid:
    """Return the grid `(t, h, w)` of a latent of shape `(C, F, H, W)`.

    Raises:
        PackingError: If the latent has other dimensions or does not divide into patches; names the sample.
    """
    if latent.ndim != 4:
        raise PackingError(
            f"Latent {sample} has shape {tuple(latent.shape)}; expected (channels, frames, height, width)."
        )
    sides = tuple(latent.shape[1:])
    if any(side % part or not side for side, part in zip(sides, patch, strict=True)):
        raise PackingError(
            f"Latent {sample} of (frames, height, width) {sides} does not divide into patches of {patch}; "
            "choose sizes with LatentSpec.snap."
        )
    t, h, w = (side // part for side, part in zip(sides, patch, strict=True))
    return t, h, w


def to_rows(tokens: torch.Tensor, strip_length: int, *, rows: int) -> torch.Tensor:
    """Cut `(L, …)` into `(rows, S, …)`, padded with zeros."""
    padding = rows * strip_length - tokens.shape[0]
    return F.pad(tokens, [0, 0] * (tokens.ndim - 1) + [0, padding]).unflatten(0, (-1, strip_length))


@torch.compiler.disable  # its loops follow the composition of the pack: a graph of them would serve no other pack
def position_rows(layout: PackedLayout, table: Callable[[Grid], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Lay out position tables as the tokens of a pack lie, with zeros for padding.

    Args:
        layout ([`PackedLayout`]): Of the pack.
        table (callable): Returns the tables of one sample, each `(L, …)`, for its grid; called once per distinct grid.

    Returns:
        `tuple` of `torch.Tensor` of shape `(R, S, …)`: As many as `table` returns.
    """
    tables = {grid: table(grid) for grid in dict.fromkeys(layout.grids)}
    samples = [
        [to_rows(_keep(part, kept), layout.strip_length, rows=rows) for part in tables[grid]]
        for grid, rows, kept in zip(layout.grids, layout.rows, _kept(layout), strict=True)
    ]
    return tuple(_with_empty_rows(torch.cat(parts), layout.empty_rows) for parts in zip(*samples, strict=True))


def to_strips(latents: Sequence[torch.Tensor], patch: Grid, *, layout: PackedLayout) -> torch.Tensor:
    """Cut latents of shape `(C, F, H, W)` into the strips of a pack, `(R, C, p_t, p_h, S·p_w)`.

    Tokens come in the order in which a patch embedding over frames, rows and columns makes them.
    """
    samples = [
        _strips_of(latent, patch, layout.strip_length, rows=rows, kept=kept)
        for latent, rows, kept in zip(latents, layout.rows, _kept(layout), strict=True)
    ]
    return _with_empty_rows(torch.cat(samples), layout.empty_rows)


def _strips_of(
    latent: torch.Tensor, patch: Grid, strip_length: int, *, rows: int, kept: torch.Tensor | None
) -> torch.Tensor:
    return tokens_to_strips(to_rows(_keep(patchify(latent, patch), kept), strip_length, rows=rows))


def _kept(layout: PackedLayout) -> Sequence[torch.Tensor | None]:
    return [None] * len(layout) if layout.kept is None else layout.kept


def _keep(tokens: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    return tokens if kept is None else tokens.index_select(0, kept)


def _with_empty_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    return F.pad(rows, [0, 0] * (rows.ndim - 1) + [0, count]) if count else rows


def patchify(latent: torch.Tensor, patch: Grid) -> torch.Tensor:
    """Turn a latent `(C, F, H, W)` into tokens `(L, C, p_t, p_h, p_w)`."""
    p_t, p_h, p_w = patch
    # (C, t, p_t, h, p_h, w, p_w) -> (t, h, w, C, p_t, p_h, p_w)
    blocks = latent.unflatten(3, (-1, p_w)).unflatten(2, (-1, p_h)).unflatten(1, (-1, p_t))
    return blocks.permute(1, 3, 5, 0, 2, 4, 6).flatten(0, 2)


def unpatchify(tokens: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Turn tokens `(L, C, p_t, p_h, p_w)` into a latent `(C, F, H, W)`: the inverse of [`patchify`]."""
    blocks = tokens.unflatten(0, grid).permute(3, 0, 4, 1, 5, 2, 6)
    return blocks.flatten(5, 6).flatten(3, 4).flatten(1, 2)


def tokens_to_strips(rows: torch.Tensor) -> torch.Tensor:
    """Turn rows of tokens `(R, S, C, p_t, p_h, p_w)` into strips `(R, C, p_t, p_h, S·p_w)`."""
    return rows.permute(0, 2, 3, 4, 1, 5).flatten(4, 5)


def to_tokens(strips: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Turn strips `(R, C, p_t, p_h, S·p_w)` into tokens `(R·S, C, p_t, p_h, p_w)`, padding included.

    Raises:
        PackingError: If the strips are not those of the layout.
    """
    rows, width = layout.num_rows, layout.strip_length
    if strips.ndim != 5 or strips.shape[0] != rows or strips.shape[4] % width:
        raise PackingError(
            f"Expected strips of shape ({rows}, channels, p_t, p_h, {width}·p_w), got {tuple(strips.shape)}."
        )
    return strips.unflatten(4, (width, -1)).permute(0, 4, 1, 2, 3, 5).flatten(0, 1)


def from_strips(strips: torch.Tensor, layout: PackedLayout) -> list[torch.Tensor]:
    """Put strips together again: the inverse of [`to_strips`], for any number of channels.

    Tokens that were dropped are zero.

    Raises:
        PackingError: If the strips are not those of the layout.
    """
    tokens = to_tokens(strips, layout)
    latents = []
    for (start, stop), grid, kept in zip(layout.spans, layout.grids, _kept(layout), strict=True):
        sample = tokens[start:stop]
        if kept is not None:
            sample = sample.new_zeros(math.prod(grid), *sample.shape[1:]).index_copy(0, kept, sample)
        latents.append(unpatchify(sample, grid))
    return latents
