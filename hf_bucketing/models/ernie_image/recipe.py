"""How ERNIE-Image is trained: flow matching with the scheduler's shift; latents normalised by block; text as it is."""

from __future__ import annotations

import torch

from ...packing.texts import pad_texts
from ..flux2.recipe import BlockRecipe, encode_blocks
from ..texts import TextEmbeddings
from .packing import FAMILY

VARIANCE_EPSILON = 1e-5
"""What the pipeline adds to the variance of latents before it takes the root."""


class ErnieImageRecipe(BlockRecipe):
    """Recipe of `ErnieImagePipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    The pipeline rewrites short prompts by a language model (`use_pe`), where it has one; captions are trained as they
    are. It takes those of any length; here `max_sequence_length` cuts them.
    """

    pipeline_class = "ErnieImagePipeline"
    family = FAMILY
    default_sequence_length = 512
    trims_text = True
    native_sizes = ((1024, 1024),)

    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images `(B, 3, 1, H, W)` in [−1, 1] to normalised blocks, `(B, 4·C, 1, h/2, w/2)`."""
        return encode_blocks(self.pipeline.vae, pixel_values, epsilon=VARIANCE_EPSILON)[:, :, None]

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions one by one, as the pipeline does, and pad them for a mask."""
        values, mask = pad_texts(self._encode_prompt(captions))
        return TextEmbeddings(values, mask.long()).padded(self.max_sequence_length)


RECIPES = (ErnieImageRecipe,)
