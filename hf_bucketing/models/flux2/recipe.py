"""How Flux.2 is trained: flow matching, shifted by size; latents normalised by block; text with its padding."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from ...buckets.sizes import Size
from ...packing.family import UNLIMITED
from ..flux.packing import BLOCK
from ..flux.recipe import FluxRecipe
from ..recipe import Recipe
from .packing import FAMILY, KV_FAMILY


class Flux2Recipe(FluxRecipe):
    """Recipe of `Flux2Pipeline`, for FLUX.2 [dev]; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    A sample may have references of any sizes that the pipelines take.

    Text follows a system message in the chat that the text encoder reads, and both count as text tokens.

    The pipelines do not shift as their scheduler is configured: they compute a shift from the number of steps too
    ([`ShiftBySteps`][hf_bucketing.models.shift.ShiftBySteps], `shift="flux2"`), which makes up for the error of few
    steps. Training has no steps, so it takes what this law tends to with many: the scheduler's line, which is Flux's.
    musubi-tuner's `flux2_shift` is the same line.
    """

    pipeline_class = "Flux2Pipeline"
    family = FAMILY
    max_references = UNLIMITED
    min_reference_side = 64
    max_reference_ratio: ClassVar[float | None] = 8
    reference_sizes: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"max_pixels": 1024**2, "cropped": True, "resample": "lanczos"}
    )
    shown_as = MappingProxyType({"reference": "image"})
    prompt_outputs = ("values",)

    @torch.no_grad()
    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images `(B, 3, 1, H, W)` in [−1, 1], normalised by the statistics of the channels of a block."""
        vae = self.pipeline.vae
        blocks = encode_blocks(vae, pixel_values, epsilon=vae.config.batch_norm_eps)
        return F.pixel_shuffle(blocks, BLOCK)[:, :, None]


@torch.no_grad()
def encode_blocks(
    vae: Any, pixel_values: torch.Tensor, *, epsilon: float, channels_first: bool = True
) -> torch.Tensor:
    """Encode images `(B, 3, 1, H, W)` in [−1, 1] to blocks of latent pixels, `(B, 4·C, h/2, w/2)`, normalised.

    The mode of the posterior is normalised by the VAE's mean and variance of a block's channels; `epsilon` is added to
    the variance. A block lists its pixels channel by channel, or, without `channels_first`, the channels pixel by
    pixel.
    """
    raw = vae.encode(pixel_values[:, :, 0].to(vae.dtype)).latent_dist.mode()
    blocks = F.pixel_unshuffle(raw, BLOCK)
    if not channels_first:
        blocks = blocks.unflatten(1, (-1, BLOCK**2)).transpose(1, 2).flatten(1, 2)
    mean, variance = (statistic.view(1, -1, 1, 1) for statistic in (vae.bn.running_mean, vae.bn.running_var))
    normalised: torch.Tensor = (blocks - mean) / torch.sqrt(variance + epsilon)
    return normalised


class BlockRecipe(Recipe):
    """Recipe of models to which a block of the latent pixels of Flux.2's VAE is one pixel."""

    image_vae = True

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return the strides of the VAE with its blocks."""
        temporal, spatial = super().vae_strides(vae)
        return temporal, spatial * BLOCK

    @property
    def latent_channels(self) -> int:
        """Channels of a block of the VAE's latents."""
        return super().latent_channels * BLOCK**2


class Flux2KleinRecipe(Flux2Recipe):
    """Recipe of `Flux2KleinPipeline`, for FLUX.2 [klein]; see [`Recipe`][hf_bucketing.models.recipe.Recipe]."""

    pipeline_class = "Flux2KleinPipeline"

    @classmethod
    def text_rule(cls) -> str:
        """Return a name of its own: the pipelines of [klein] put captions into the template of another model."""
        return "Flux2KleinRecipe"


class Flux2KleinKVRecipe(Flux2KleinRecipe):
    """Recipe of `Flux2KleinKVPipeline`, for FLUX.2 [klein] KV; see [`Recipe`][hf_bucketing.models.recipe.Recipe]."""

    pipeline_class = "Flux2KleinKVPipeline"
    family = KV_FAMILY
    constructor_reads = ("trained",)
    """The pipeline sets the transformer's processors."""

    def render(self, prompt: str, size: Size, *, guidance_scale: float | None = None, **options: Any) -> np.ndarray:
        """Call the pipeline, which takes no scale of guidance; see [`Recipe.render`]."""
        return super().render(prompt, size, **options)


RECIPES = (Flux2Recipe, Flux2KleinRecipe, Flux2KleinKVRecipe)
