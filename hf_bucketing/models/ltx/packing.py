"""LTX-Video: latents as rows of tokens; rotary positions in seconds and pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...packing.attention.dispatch import Backend
from ...packing.context import active_layout
from ...packing.family import Family, Transformer, texts_over_rows
from ...packing.layout import Grid
from ...packing.positions import axis_coordinates, over_grid
from ...packing.strips import patchify, position_rows, to_tokens, token_grid, tokens_to_strips, unpatchify
from .processor import PackedLTXVideoAttnProcessor

if TYPE_CHECKING:
    from ...packing.pack import PackedBatch


class LTXFamily(Family):
    """Recipe of `LTXVideoTransformer3DModel`; see [`Family`][hf_bucketing.models.registry.Family].

    `rope_interpolation_scale`, `(n, 3)`, is what the pipeline makes of a sample's frame rate and the autoencoder:
    temporal stride ÷ frame rate, spatial stride, spatial stride.
    """

    interpolates = True

    def in_channels(self, transformer: Transformer) -> int:
        """Return the channels of a latent: the model counts those of a patch."""
        p_t, p_h, p_w = self.patch(transformer)
        return int(transformer.config.in_channels) // (p_t * p_h * p_w)

    def text_dim(self, transformer: Transformer) -> int:
        """Return the channels of a caption."""
        return int(transformer.config.caption_channels)

    def conditioning(self, transformer: Transformer) -> tuple[str, ...]:
        """Return seconds per latent frame and pixels per latent row and column."""
        return ("rope_interpolation_scale",)

    def draw_conditioning(self, transformer: Transformer, grids: Sequence[Grid]) -> dict[str, torch.Tensor]:
        """Return 24 frames per second and LTX-Video's autoencoder for all."""
        return {"rope_interpolation_scale": torch.tensor([[8 / 24, 32.0, 32.0]]).repeat(len(grids), 1)}

    def processor(self, name: str, backend: Backend) -> PackedLTXVideoAttnProcessor:
        """Return LTX-Video's."""
        return PackedLTXVideoAttnProcessor(backend)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hand `rope` each token's own coordinates."""
        patch = self.patch(transformer)

        def locate(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden_states, _, _, _, scales, _ = args
            layout, device = active_layout(), hidden_states.device

            def table(grid: Grid) -> tuple[torch.Tensor]:
                return (torch.stack(over_grid(axis_coordinates(grid, base_size, device=device)), 1),)

            (coordinates,) = position_rows(layout, table)  # (rows, strip_length, 3)
            scaled = coordinates * scales.to(coordinates)[layout.row_segments][:, None]
            return hidden_states, None, None, None, None, (scaled * coordinates.new_tensor(patch)).transpose(1, 2)

        return [transformer.rope.register_forward_pre_hook(locate)]

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Give latents as tokens `(rows, strip_length, channels)`, and the samples' scales for the positions."""
        rows = to_tokens(batch.strips, batch.layout).unflatten(0, (-1, batch.layout.strip_length))
        return {
            "hidden_states": rows.flatten(2),
            "timestep": batch.row_timesteps,
            "encoder_hidden_states": texts_over_rows(batch),
            "encoder_attention_mask": None,
            **batch.conditioning,
        }

    def output_strips(self, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
        """Put the tokens back into strips."""
        return tokens_to_strips(output.unflatten(2, (-1, *batch.patch)))

    def run_alone(
        self,
        transformer: Transformer,
        latent: torch.Tensor,
        *,
        timestep: torch.Tensor,
        text: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Run a batch of one, as tokens."""
        patch = self.patch(transformer)
        grid = token_grid(latent, patch, sample=0)
        output: torch.Tensor = transformer(
            patchify(latent, patch).flatten(1)[None],
            encoder_hidden_states=text[None],
            timestep=timestep[None],
            encoder_attention_mask=text.new_ones(1, len(text)),
            num_frames=grid[0],
            height=grid[1],
            width=grid[2],
            rope_interpolation_scale=conditioning["rope_interpolation_scale"],
            return_dict=False,
        )[0]
        return unpatchify(output[0].unflatten(1, (-1, *patch)), grid)
