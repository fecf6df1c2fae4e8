"""Flux: images in 2×2 blocks, rotary positions over rows and columns; text in joint attention.

The pipeline masks no text: pass the embeddings with their padding. Timesteps are the scheduler's, up to 1000, as for
the other families; the model gets a thousandth of them, as from its pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import PackingError
from ..packing.batch import PackedBatch
from ..packing.context import active_layout
from ..packing.family import UNLIMITED, Transformer
from ..packing.layout import Grid, PackedLayout
from ..packing.positions import axis_coordinates, over_grid, position_strips
from ..packing.strips import from_strips, to_strips, token_grid
from .joint import JointFamily, refuse_videos

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

    def conditioning(self, transformer: Transformer) -> tuple[str, ...]:
        """Return the pooled text embeddings, `(n, pooled_projection_dim)`, and the distilled guidance, `(n,)`."""
        return ("pooled_projections", *(("guidance",) if transformer.config.guidance_embeds else ()))

    def check_layout(self, transformer: Transformer, layout: PackedLayout) -> None:
        """Refuse videos, also where positions are stretched."""
        refuse_videos(transformer, layout.grids)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook `pos_embed`. Text has position zero, which does not rotate, so the processor leaves it alone."""

        def rotate(embed: Any, args: tuple[torch.Tensor, ...], output: Any) -> tuple[torch.Tensor, ...]:
            layout = active_layout()  # embed.forward instead of embed(…), which would call this hook again
            return position_strips(layout, lambda grid: embed.forward(_ids(grid, base_size, device=layout.device)))

        return [transformer.pos_embed.register_forward_hook(rotate)]

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Flatten each block of latent pixels into a token; positions come from the hook."""
        kwargs = super().forward_kwargs(batch)
        text = kwargs["encoder_hidden_states"]
        return {
            **kwargs,
            "hidden_states": _tokens(batch.strips),
            "timestep": kwargs["timestep"] / 1000,
            "img_ids": text.new_zeros(batch.layout.strip_length, 3),
            "txt_ids": text.new_zeros(text.shape[1], 3),
        }

    def output_strips(self, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
        """Unflatten the channels of each token into a block."""
        return _strips(output)

    def run_alone(
        self,
        transformer: Transformer,
        latent: torch.Tensor,
        *,
        timestep: torch.Tensor,
        text: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Run a batch of one image."""
        grid = token_grid(latent, self.patch(transformer), sample=0)
        layout = PackedLayout(grids=(grid,), text_lengths=(len(text),), strip_length=grid[1] * grid[2])
        output: torch.Tensor = transformer(
            hidden_states=_tokens(to_strips([latent], self.patch(transformer), layout=layout)),
            timestep=timestep[None] / 1000,
            encoder_hidden_states=text[None],
            img_ids=_ids(grid, None, device=latent.device),
            txt_ids=text.new_zeros(len(text), 3),
            **{name: values[None] for name, values in conditioning.items()},
            return_dict=False,
        )[0]
        return from_strips(_strips(output), layout)[0]


def _tokens(strips: torch.Tensor) -> torch.Tensor:
    """Turn strips `(R, C, 1, p, S·p)` into tokens `(R, S, C·p·p)`, as Flux orders a block: channels first."""
    return strips.unflatten(4, (-1, BLOCK)).permute(0, 4, 1, 2, 3, 5).flatten(2)


def _strips(tokens: torch.Tensor) -> torch.Tensor:
    """Turn tokens `(R, S, C·p·p)` into strips `(R, C, 1, p, S·p)`."""
    return tokens.unflatten(2, (-1, 1, BLOCK, BLOCK)).permute(0, 2, 3, 4, 1, 5).flatten(4)


def _ids(grid: Grid, base_size: Grid | None, *, device: torch.device | str) -> torch.Tensor:
    """Return the position of each token as the pipelines number it: `(h·w, 3)` of zero, row and column."""
    return torch.stack(over_grid(axis_coordinates(grid, base_size, device=device)), 1)


FAMILY = FluxFamily()
