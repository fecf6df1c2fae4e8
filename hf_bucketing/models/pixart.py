"""PixArt-α and PixArt-Σ: images; sine-cosine positions; resolution and aspect ratio where trained with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..packing.attention.dispatch import Backend
from ..packing.family import UNLIMITED, Family, Transformer, texts_over_rows
from ..packing.layout import Grid
from ..packing.processors.attn import PackedAttnProcessor
from ..packing.sincos import hook_patch_embed

if TYPE_CHECKING:
    from ..packing.pack import PackedBatch


class PixArtFamily(Family):
    """Recipe of `PixArtTransformer2DModel`; see [`Family`][hf_bucketing.models.registry.Family].

    An image is a sample of one frame. Its positions are stretched to `sample_size` by the model itself.
    """

    def limits(self, transformer: Transformer) -> Grid:
        """Return one frame."""
        return 1, UNLIMITED, UNLIMITED

    def text_dim(self, transformer: Transformer) -> int:
        """Return the channels of a caption, or of attention's keys where captions are not projected."""
        return int(transformer.config.caption_channels or transformer.config.cross_attention_dim)

    def conditioning(self, transformer: Transformer) -> tuple[str, ...]:
        """Return what PixArt-α was trained with at 1024 pixels: height and width in pixels, and height ÷ width."""
        return ("resolution", "aspect_ratio") if transformer.use_additional_conditions else ()

    def draw_conditioning(self, transformer: Transformer, grids: Sequence[Grid]) -> dict[str, torch.Tensor]:
        """Return each image's own, with eight pixels to a latent row and column."""
        if not self.conditioning(transformer):
            return {}
        sides = torch.tensor([[h, w] for _, h, w in grids]) * 8.0 * transformer.config.patch_size
        return {"resolution": sides, "aspect_ratio": sides[:, :1] / sides[:, 1:]}

    def processor(self, name: str, backend: Backend) -> PackedAttnProcessor:
        """Attend inside a sample."""
        return PackedAttnProcessor(backend)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the patch embedding."""
        return [hook_patch_embed(transformer.pos_embed)]

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Give images as `(rows, channels, height, width)`, and each row its image's resolution."""
        rows = batch.layout.row_segments
        return {
            "hidden_states": batch.strips[:, :, 0],
            "timestep": batch.row_timesteps,
            "encoder_hidden_states": texts_over_rows(batch),
            "added_cond_kwargs": _added({name: values[rows] for name, values in batch.conditioning.items()}),
        }

    def output_strips(self, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
        """Give the images their frame back."""
        return output[:, :, None]

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
        output: torch.Tensor = transformer(
            latent[None, :, 0],
            encoder_hidden_states=text[None],
            timestep=timestep[None],
            added_cond_kwargs=_added({name: values[None] for name, values in conditioning.items()}),
            return_dict=False,
        )[0]
        return output[0][:, None]


def _added(conditioning: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    return {"resolution": None, "aspect_ratio": None, **conditioning}
