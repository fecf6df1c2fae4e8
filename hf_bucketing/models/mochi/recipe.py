"""How Mochi is trained: flow matching; text masked; latents normalised by channel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..recipe import Recipe
from ..texts import TextEmbeddings
from .packing import FAMILY


class MochiRecipe(Recipe):
    """Recipe of `MochiPipeline`; see [`Recipe`].

    The linear-quadratic noise levels of the pipeline are a choice of sampling steps; training draws any level.
    """

    pipeline_class = "MochiPipeline"
    family = FAMILY
    default_sequence_length = 256
    native_sizes = ((480, 848),)

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return the strides of the VAE, the products of its expansions."""
        return math.prod(vae["temporal_expansions"]), math.prod(vae["spatial_expansions"])

    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions; one by one if any is empty, because the pipeline looks at the last one of a batch alone."""
        if "" not in captions or len(captions) == 1:
            return super().encode_text(captions)
        values, masks, _ = zip(*(self.encode_text([caption]) for caption in captions), strict=True)
        return TextEmbeddings(torch.cat(values), torch.cat(masks))


RECIPES = (MochiRecipe,)
