"""How PixArt-α and PixArt-Σ are trained: denoising with a learned variance; text masked."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.utils import is_bs4_available, is_ftfy_available

from ...buckets.sizes import Size
from ..recipe import Recipe, Samples, TextEmbeddings
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

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions as the pipeline's call does, which cleans them where it can, with a mask."""
        values, mask, *_ = self._encode_prompt(captions, do_classifier_free_guidance=False, clean_caption=_cleans())
        return TextEmbeddings(values, mask)

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return each image's height and width in pixels and height ÷ width, for models trained with them."""
        if not self.transformer.use_additional_conditions:
            return {}
        sides = [latent.shape[2:] for latent in samples.noised.latents]
        resolution = torch.tensor(sides, dtype=torch.float32) * self.spec.spatial_stride
        return {"resolution": resolution, "aspect_ratio": resolution[:, :1] / resolution[:, 1:]}

    def render(self, prompt: str, size: Size, *, image: Any = None, **options: Any) -> np.ndarray:
        """Call the pipeline, which would otherwise make the nearest of its own sizes and stretch that."""
        options = {"use_resolution_binning": False, "clean_caption": _cleans(), **options}
        return super().render(prompt, size, image=image, **options)


class PixArtSigmaRecipe(PixArtAlphaRecipe):
    """Recipe of `PixArtSigmaPipeline`; see [`Recipe`]."""

    pipeline_class = "PixArtSigmaPipeline"
    default_sequence_length = 300
    native_sizes = ((256, 256), (512, 512), (1024, 1024), (2048, 2048))
    """One for each of the four models."""


def _cleans() -> bool:
    """Return whether the pipelines clean captions, which takes two libraries."""
    return bool(is_bs4_available() and is_ftfy_available())


RECIPES = (PixArtAlphaRecipe, PixArtSigmaRecipe)
