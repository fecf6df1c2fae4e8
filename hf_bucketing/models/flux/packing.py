"""Flux: images in 2×2 blocks, rotary positions over rows and columns; text in joint attention.

The pipeline masks no text: pass the embeddings with their padding. Timesteps are the scheduler's, up to 1000, as for
the other families; the model gets a thousandth of them, as from its pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.family import Transformer
from ...packing.names import Grid
from ...packing.positions import axis_coordinates, over_grid
from ...packing.processors import Rotary
from ...packing.texts import TextTokens
from ..joint import JointFamily, hook_text_modulation

BLOCK = 2
"""Latent rows and columns that the pipelines put into one token."""


class FluxFamily(JointFamily):
    """Packing of `FluxTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "FluxTransformer2DModel"
    tested_forwards: ClassVar[tuple[str, ...]] = ("0bde5c7179d8", "53dba489fdb2", "9951f6ffc64f")
    stock_processors: ClassVar[tuple[str, ...]] = ("FluxAttnProcessor",)
    processors_read_fusion = True
    text = TextTokens(rows="slots", channels="joint_attention_dim", padding="encoded_padding")
    interpolates = True
    images_only = True
    latents_as = "tokens"
    attention_kwargs: ClassVar[str | None] = "joint_attention_kwargs"
    position_module = "pos_embed"
    original_names: ClassVar[tuple[tuple[str, str], ...] | None] = (  # ComfyUI takes the names of diffusers
        ("transformer_blocks.**", "transformer_blocks.**"),
        ("single_transformer_blocks.**", "single_transformer_blocks.**"),
    )
    original_prefix: ClassVar[str] = "transformer."
    rotates_text = True
    max_references: ClassVar[int] = 1
    reference_step: ClassVar[int] = 1
    """By how much the first coordinate of each reference exceeds that of the grid before it."""

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse channel counts that are not a block of four latent pixels."""
        channels, patch = transformer.config.in_channels, transformer.config.get("patch_size", 1)
        if channels % BLOCK**2 or patch != 1:
            raise PackingError(
                f"A token of {type(transformer).__name__} holds {BLOCK}×{BLOCK} latent pixels, so in_channels must be "
                f"a multiple of {BLOCK**2} and patch_size 1; got {channels} and {patch}."
            )
        super().check(transformer, strip_length=strip_length)

    def patch(self, config: Mapping[str, Any]) -> Grid:
        """Return the block of latent pixels that makes a token, whatever the `patch_size` of the transformer."""
        return 1, BLOCK, BLOCK

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Number tokens by row and column."""
        # module.forward instead of module(…), which would call the hook again
        return tuple(module.forward(token_ids(grid, base_size, device=device)))

    def reference_positions(self, module: Any, grids: tuple[Grid, ...], *, device: torch.device) -> Rotary:
        """Number the tokens of a reference likewise, with 1 as their first coordinate (FLUX.1 Kontext)."""
        return tuple(module.forward(self.ids(grids, device=device)[math.prod(grids[0]) :]))

    def text_positions(self, module: Any, grids: tuple[Grid, ...], length: int, *, device: torch.device) -> Rotary:
        """Place text by [`text_ids`]; at zero, nothing turns, but is rounded to float32, as in the stock model."""
        return tuple(module.forward(self.text_ids(length, device=device)))

    def text_ids(self, length: int, *, device: torch.device) -> torch.Tensor:
        """Return the positions of a text's tokens, `(length, 3)`: zero."""
        return torch.zeros(length, 3, device=device)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the norms, to modulate text by its own sample's timestep."""
        return [*super().hook_positions(transformer, base_size), *hook_text_modulation(transformer, single="first")]

    def ids(self, grids: tuple[Grid, ...], *, device: torch.device) -> torch.Tensor:
        """Return the positions of all tokens of a sample, those of its references behind its own, `(tokens, 3)`."""
        steps = [self.reference_step * number for number in range(len(grids))]
        return torch.cat([token_ids(grid, first=step, device=device) for grid, step in zip(grids, steps, strict=True)])

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Number the tokens as the pipelines do; the hook replaces these positions in a pack."""
        return {
            **super().inputs(rows),
            "timestep": rows.timesteps / 1000,
            "img_ids": self.ids(rows.grids, device=rows.latents.device),
            "txt_ids": self.text_ids(rows.text.shape[1], device=rows.latents.device),
        }


def token_ids(
    grid: Grid, base_size: Grid | None = None, *, first: float = 0, device: torch.device | str
) -> torch.Tensor:
    """Return the position of each token as the pipelines number it: `(h·w, 3)` of `first`, row and column."""
    frames, *sides = axis_coordinates(grid, base_size, device=device)
    return torch.stack(over_grid([frames + first, *sides]), 1)


FAMILY = FluxFamily()
