"""How PRX is trained: flow matching with the scheduler's shift; captions cleaned as by the pipeline, and masked."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..recipe import Recipe
from ..texts import TextEmbeddings
from .packing import FAMILY


class PRXRecipe(Recipe):
    """Recipe of `PRXPipeline`, whose VAE is one of FLUX.1's kind or a deep-compression autoencoder; see [`Recipe`].

    Captions are cut to `max_sequence_length` tokens; the pipeline's own length is that of its tokenizer.
    """

    pipeline_class = "PRXPipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = 256
    trims_text = True
    native_sizes = ((256, 256), (512, 512), (1024, 1024))
    call_defaults = MappingProxyType({"use_resolution_binning": False})
    """Else the pipeline makes the nearest of its own sizes and stretches that."""

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return the strides of the VAE, which an autoencoder has from the blocks of its encoder."""
        blocks = vae.get("encoder_block_out_channels")
        return super().vae_strides(vae) if blocks is None else (1, 2 ** (len(blocks) - 1))

    @torch.no_grad()
    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images `(B, 3, 1, H, W)` in [−1, 1]: by an autoencoder as they are, else to the mode."""
        vae = self.pipeline.vae
        encoded = vae.encode(pixel_values[:, :, 0].to(vae.dtype))
        latents = encoded.latent if "latent" in encoded else encoded.latent_dist.mode()
        shifted: torch.Tensor = latents - (vae.config.get("shift_factor") or 0.0)
        return (shifted * vae.config.scaling_factor)[:, :, None]

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions, which the pipeline cleans."""
        values, mask, *_ = self.pipeline.encode_prompt(
            captions,
            device=self.pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            tokenizer_max_length=self.max_sequence_length,
        )
        return TextEmbeddings(values, mask.long())


RECIPES = (PRXRecipe,)

REFUSED = {"PRXPixelPipeline": "its model makes pixels, where a run trains on the latents of a VAE"}
