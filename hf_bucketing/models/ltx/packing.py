"""How LTX-Video is packed: latents as sequences of tokens; rotary positions in seconds and pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...packing.batch import PackedBatch
from ...packing.context import active_layout
from ...packing.family import Family, Transformer
from ...packing.layout import Grid
from ...packing.positions import axis_coordinates, over_grid, position_strips
from ...packing.processors import PackedAttnProcessor, rotate_channels
from ...packing.strips import patchify, strips_to_tokens, token_grid, tokens_to_strips, unpatchify


class PackedLTXVideoAttnProcessor(PackedAttnProcessor):
    """Self- and cross-attention of LTX-Video's `LTXAttention` over the strips of a pack."""

    norms_whole_width = True

    def rotate(self, tokens: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Rotate neighbouring channels of `(N, H, D)` by tables `(strips, strip_length, H·D)`."""
        return rotate_channels(tokens, rotary)


class LTXFamily(Family):
    """Packing of `LTXVideoTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    `rope_interpolation_scale`, `(n, 3)`, is computed by the pipeline from a sample's frame rate and the autoencoder:
    temporal stride ÷ frame rate, spatial stride, spatial stride.
    """

    transformer_class = "LTXVideoTransformer3DModel"
    processor_class = PackedLTXVideoAttnProcessor
    interpolates = True

    def in_channels(self, transformer: Transformer) -> int:
        """Return the channels of a latent; the model's configuration counts those of a patch."""
        p_t, p_h, p_w = self.patch(transformer)
        return int(transformer.config.in_channels) // (p_t * p_h * p_w)

    def conditioning(self, transformer: Transformer) -> tuple[str, ...]:
        """Return seconds per latent frame and pixels per latent row and column."""
        return ("rope_interpolation_scale",)

    def draw_conditioning(self, transformer: Transformer, grids: Sequence[Grid]) -> dict[str, torch.Tensor]:
        """Return 24 frames per second and LTX-Video's autoencoder for all."""
        return {"rope_interpolation_scale": torch.tensor([[8 / 24, 32.0, 32.0]]).repeat(len(grids), 1)}

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Pass `rope` each token's own coordinates."""
        patch = self.patch(transformer)

        def locate(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden_states, _, _, _, scales, _ = args
            layout, device = active_layout(), hidden_states.device

            def table(grid: Grid) -> tuple[torch.Tensor]:
                return (torch.stack(over_grid(axis_coordinates(grid, base_size, device=device)), 1),)

            (coordinates,) = position_strips(layout, table)  # (strips, strip_length, 3)
            scaled = coordinates * scales.to(coordinates)[layout.strip_segments][:, None]
            return hidden_states, None, None, None, None, (scaled * coordinates.new_tensor(patch)).transpose(1, 2)

        return [transformer.rope.register_forward_pre_hook(locate)]

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Pass latents as tokens `(strips, strip_length, channels)`, and the samples' scales for the positions."""
        return {
            "hidden_states": strips_to_tokens(batch.strips, batch.layout).flatten(2),
            "timestep": batch.strip_timesteps,
            "encoder_hidden_states": batch.text_by_strip(),
            "encoder_attention_mask": None,
            **batch.conditioning,
        }

    def output_strips(self, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
        """Turn the tokens back into strips."""
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


FAMILY = LTXFamily()
