"""How Mochi is trained: flow matching; text masked; latents normalised by channel."""

from __future__ import annotations

import math

import torch

from ...buckets.sizes import LatentSpec
from ..loading import read_configs
from ..recipe import Recipe, TextEmbeddings
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
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the strides of the VAE and the patch of the transformer."""
        vae, transformer = read_configs(name_or_path)
        side = transformer["patch_size"]
        return LatentSpec(
            temporal_stride=math.prod(vae["temporal_expansions"]),
            spatial_stride=math.prod(vae["spatial_expansions"]),
            patch=(1, side, side),
        )

    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions; one by one if any is empty, because the pipeline looks at the last one of a batch alone."""
        if "" not in captions or len(captions) == 1:
            return super().encode_text(captions)
        values, masks, _ = zip(*(self.encode_text([caption]) for caption in captions), strict=True)
        return TextEmbeddings(torch.cat(values), torch.cat(masks))


RECIPES = (MochiRecipe,)
