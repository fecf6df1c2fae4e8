"""Latents to strips and back.

C channels, F latent frames, H and W latent rows and columns, L tokens, R strips, S strip_length; p_t, p_h, p_w are the
sides of a patch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from ..errors import PackingError
from .layout import PackedLayout
from .names import Grid


def token_grid(latent: torch.Tensor, patch: Grid, *, sample: int, name: str = "Latent") -> Grid:
    """Return the grid `(t, h, w)` of a latent of shape `(C, F, H, W)`.

    Raises:
        PackingError: If the latent has other dimensions or does not divide into patches; names the sample.
    """
    if latent.ndim != 4:
        raise PackingError(
            f"{name} {sample} has shape {tuple(latent.shape)}; expected (channels, frames, height, width)."
        )
    sides = tuple(latent.shape[1:])
    if any(side % part or not side for side, part in zip(sides, patch, strict=True)):
        raise PackingError(
            f"{name} {sample} of (frames, height, width) {sides} does not divide into patches of {patch}; "
            "choose sizes with LatentSpec.snap."
        )
    t, h, w = (side // part for side, part in zip(sides, patch, strict=True))
    return t, h, w


def patchify(latents: torch.Tensor, patch: Grid) -> torch.Tensor:
    """Turn latents `(…, C, F, H, W)` into tokens `(…, L, C, p_t, p_h, p_w)`, in the order of a patch embedding."""
    p_t, p_h, p_w = patch
    # (…, C, t, p_t, h, p_h, w, p_w) -> (…, t, h, w, C, p_t, p_h, p_w)
    blocks = latents.unflatten(-1, (-1, p_w)).unflatten(-3, (-1, p_h)).unflatten(-5, (-1, p_t))
    return blocks.movedim((-6, -4, -2), (-7, -6, -5)).flatten(-7, -5)


def unpatchify(tokens: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Turn tokens `(…, L, C, p_t, p_h, p_w)` into latents `(…, C, F, H, W)`: the inverse of [`patchify`]."""
    blocks = tokens.unflatten(-5, grid).movedim((-7, -6, -5), (-6, -4, -2))
    return blocks.flatten(-2, -1).flatten(-3, -2).flatten(-4, -3)


def by_strip(samples: Iterable[torch.Tensor], layout: PackedLayout) -> torch.Tensor:
    """Cut each sample's tokens `(L, …)` into strips, `(R, S, …)` in all, without dropped tokens and with padding.

    The tokens are those of a sample's own grid, whose dropped ones are left away, and of its references, or those of
    its own grid alone: then zeros take the places of the others.
    """
    pieces, counts = [], [*layout.strips_per_sample]
    counts[-1] += layout.padding_strips
    for tokens, grid, count, kept in zip(samples, layout.grids, counts, kept_tokens(layout), strict=True):
        num_tokens = math.prod(grid)
        parts = [tokens] if kept is None else [tokens[:num_tokens].index_select(0, kept), tokens[num_tokens:]]
        padding = count * layout.strip_length - sum(map(len, parts))
        parts.append(tokens.new_zeros(padding, *tokens.shape[1:]))
        pieces += [part for part in parts if len(part)]
    joined = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return joined.unflatten(0, (-1, layout.strip_length))


def kept_tokens(layout: PackedLayout) -> Sequence[torch.Tensor | None]:
    """Return the indices of the tokens of its own grid that each sample keeps; None for all tokens."""
    return [None] * len(layout) if layout.kept is None else layout.kept


def to_strips(
    latents: Sequence[torch.Tensor],
    patch: Grid,
    *,
    layout: PackedLayout,
    references: Sequence[Sequence[torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Cut latents of shape `(C, F, H, W)` into the strips of a pack, `(R, C, p_t, p_h, S·p_w)`.

    Those of each sample's references follow its own; without `references`, zeros take their places.
    """
    samples = [[latent] for latent in latents]
    if references is not None:
        samples = [[latent, *others] for latent, others in zip(latents, references, strict=True)]
    tokens = by_strip((grids_to_tokens(grids, patch) for grids in samples), layout)
    return unpatchify(tokens, (1, 1, layout.strip_length))


def grids_to_tokens(latents: Sequence[torch.Tensor], patch: Grid) -> torch.Tensor:
    """Turn latents `(…, C, F, H, W)` of several sizes into one row of tokens, `(…, L, C, p_t, p_h, p_w)`."""
    tokens = [patchify(latent, patch) for latent in latents]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens, -5)


def strips_to_tokens(strips: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Turn strips `(R, C, p_t, p_h, S·p_w)` into tokens by strip `(R, S, C, p_t, p_h, p_w)`, padding included.

    Raises:
        PackingError: If the strips do not have the layout's shape.
    """
    count, length = layout.num_strips, layout.strip_length
    if strips.ndim != 5 or strips.shape[0] != count or strips.shape[4] % length:
        raise PackingError(
            f"Expected strips of shape ({count}, channels, p_t, p_h, {length}·p_w), got {tuple(strips.shape)}."
        )
    return patchify(strips, (*strips.shape[2:4], strips.shape[4] // length))


def from_strips(strips: torch.Tensor, layout: PackedLayout) -> list[torch.Tensor]:
    """Join strips into latents again: the inverse of [`to_strips`], for any number of channels.

    Dropped tokens are zero, and references left away.

    Raises:
        PackingError: If the strips do not have the layout's shape.
    """
    tokens = strips_to_tokens(strips, layout).flatten(0, 1)
    latents = []
    for (start, stop), grid, kept in zip(layout.own_spans, layout.grids, kept_tokens(layout), strict=True):
        sample = tokens[start:stop]
        if kept is not None:
            sample = sample.new_zeros(math.prod(grid), *sample.shape[1:]).index_copy(0, kept, sample)
        latents.append(unpatchify(sample, grid))
    return latents
