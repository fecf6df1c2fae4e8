"""Flux: images in 2×2 blocks, rotary positions over rows and columns; text in joint attention.

The pipeline masks no text: pass the embeddings with their padding. Timesteps are the scheduler's, up to 1000, as for
the other families; the model gets a thousandth of them, as from its pipeline.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import PackingError
from ..packing.batch import Rows
from ..packing.family import UNLIMITED, Transformer
from ..packing.layout import Grid
from ..packing.positions import axis_coordinates, hook_output, over_grid
from ..packing.strips import patchify, unpatchify
from .joint import JointFamily

BLOCK = 2
"""Latent rows and columns that the pipelines put into one token."""


class FluxFamily(JointFamily):
    """Packing of `FluxTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "FluxTransformer2DModel"
    text_channels = "joint_attention_dim"
    text_rule = "encoded_padding"
    interpolates = True

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse channel counts that are not a block of four latent pixels."""
        channels, patch = transformer.config.in_channels, transformer.config.patch_size
        if channels % BLOCK**2 or patch != 1:
            raise PackingError(
                f"A Flux token holds {BLOCK}×{BLOCK} latent pixels, so in_channels must be a multiple of {BLOCK**2} "
                f"and patch_size 1; got {channels} and {patch}."
            )
        super().check(transformer, strip_length=strip_length)

    def limits(self, transformer: Transformer) -> Grid:
        """Return one frame."""
        return 1, UNLIMITED, UNLIMITED

    def patch(self, transformer: Transformer) -> Grid:
        """Return the block of latent pixels that makes a token."""
        return 1, BLOCK, BLOCK

    def in_channels(self, transformer: Transformer) -> int:
        """Return the channels of a latent; a token holds those of a whole block."""
        return int(transformer.config.in_channels) // BLOCK**2

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook `pos_embed`. Text has position zero, which does not rotate, so the processor leaves it alone."""

        def table(embed: Any, grid: Grid, device: torch.device) -> tuple[torch.Tensor, ...]:
            # embed.forward instead of embed(…), which would call the hook again
            return tuple(embed.forward(_ids(grid, base_size, device=device)))

        return [hook_output(transformer.pos_embed, table)]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Flatten each block of latent pixels into a token, channels first; strips get their positions by the hook."""
        return {
            **super().inputs(rows),
            "hidden_states": patchify(rows.latents, rows.patch).flatten(2),
            "timestep": rows.timesteps / 1000,
            "img_ids": _ids(rows.grid, None, device=rows.latents.device),
            "txt_ids": rows.text.new_zeros(rows.text.shape[1], 3),
        }

    def latents(self, output: torch.Tensor, *, grid: Grid, patch: Grid) -> torch.Tensor:
        """Unflatten the channels of each token into a block."""
        return unpatchify(output.unflatten(2, (-1, *patch)), grid)


def _ids(grid: Grid, base_size: Grid | None, *, device: torch.device | str) -> torch.Tensor:
    """Return the position of each token as the pipelines number it: `(h·w, 3)` of zero, row and column."""
    return torch.stack(over_grid(axis_coordinates(grid, base_size, device=device)), 1)


FAMILY = FluxFamily()
