"""How PixArt-α and PixArt-Σ are trained: denoising with a learned variance; text masked."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from ...buckets.sizes import Size
from ..recipe import Recipe
from ..samples import Samples
from ..texts import cleans_captions
from .packing import FAMILY


class PixArtAlphaRecipe(Recipe):
    """Recipe of `PixArtAlphaPipeline`; see [`Recipe`]."""

    pipeline_class = "PixArtAlphaPipeline"
    family = FAMILY
    denoises = True
    image_vae = True
    default_sequence_length = 120
    native_sizes: ClassVar[tuple[tuple[int, int], ...]] = ((512, 512), (1024, 1024))
    """One for each of the two models; the pipeline also has 32 sizes of other shapes for each."""
    call_defaults = MappingProxyType({"use_resolution_binning": False})
    """Else the pipeline makes the nearest of its own sizes and stretches that."""

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return each image's height and width in pixels and height ÷ width, for models trained with them."""
        if not self.transformer.use_additional_conditions:
            return {}
        sides = [latent.shape[2:] for latent in samples.noised.latents]
        resolution = torch.tensor(sides, dtype=torch.float32) * self.spec.spatial_stride
        return {"resolution": resolution, "aspect_ratio": resolution[:, :1] / resolution[:, 1:]}

    def render(self, prompt: str, size: Size, *, image: Any = None, **options: Any) -> np.ndarray:
        """Call the pipeline, which cleans captions where it can."""
        options = {"clean_caption": cleans_captions(), **options}
        return super().render(prompt, size, image=image, **options)


class PixArtSigmaRecipe(PixArtAlphaRecipe):
    """Recipe of `PixArtSigmaPipeline`; see [`Recipe`]."""

    pipeline_class = "PixArtSigmaPipeline"
    default_sequence_length = 300
    native_sizes = ((256, 256), (512, 512), (1024, 1024), (2048, 2048))
    """One for each of the four models."""


RECIPES = (PixArtAlphaRecipe, PixArtSigmaRecipe)
