"""How Qwen-Image is trained: flow matching, shifted by size; text in the pipeline's template, masked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..recipe import Recipe, TextEmbeddings
from .packing import FAMILY


class QwenImageRecipe(Recipe):
    """Recipe of `QwenImagePipeline`; see [`Recipe`]."""

    pipeline_class = "QwenImagePipeline"
    family = FAMILY
    default_sequence_length = 512
    trims_text = True
    native_sizes = ((1328, 1328), (928, 1664), (1664, 928), (1104, 1472), (1472, 1104), (1056, 1584), (1584, 1056))

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return the strides of a VAE that halves frames and sides as its configuration lists."""
        halved = vae["temperal_downsample"]
        return 2 ** sum(halved), 2 ** len(halved)

    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions in the pipeline's template, padded to `max_sequence_length`."""
        return super().encode_text(captions).padded(self.max_sequence_length)


RECIPES = (QwenImageRecipe,)
