"""How Flux is trained: flow matching, shifted by size; text with its padding, and the pooled text of CLIP."""

from __future__ import annotations

from types import MappingProxyType

import torch

from ...buckets.sizes import LatentSpec
from ..control import ControlRecipe
from ..loading import image_spec
from ..recipe import Recipe, TextEmbeddings
from .packing import BLOCK, FAMILY


class FluxRecipe(Recipe):
    """Recipe of `FluxPipeline`, for FLUX.1 [dev] and [schnell]; see [`Recipe`]."""

    pipeline_class = "FluxPipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = 512
    native_sizes = ((1024, 1024),)
    guidance_factor = 1.0

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the VAE's stride; a token is a block of latent pixels, whatever the transformer's `patch_size`."""
        return image_spec(name_or_path, side=BLOCK)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions by T5, and by CLIP to one pooled embedding each."""
        values, pooled, _ = self._encode_prompt(captions)
        return TextEmbeddings(values, others={"pooled_projections": pooled})


class FluxControlRecipe(ControlRecipe, FluxRecipe):
    """Recipe of `FluxControlPipeline`, for FLUX.1 Canny and Depth [dev]; see [`ControlRecipe`].

    A pipeline of FLUX.1 [dev] whose `x_embedder` was widened to 128 channels, with zeros, begins a control of its own.
    """

    pipeline_class = "FluxControlPipeline"
    shown_as = MappingProxyType({"control": "control_image"})


RECIPES = (FluxRecipe, FluxControlRecipe)
