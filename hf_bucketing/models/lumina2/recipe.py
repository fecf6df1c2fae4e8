"""How Lumina 2 is trained: flow matching, with one shift; text after the pipeline's system prompt, masked."""

from __future__ import annotations

import torch

from ..recipe import Recipe
from ..texts import TextEmbeddings
from .packing import FAMILY


class Lumina2Recipe(Recipe):
    """Recipe of `Lumina2Pipeline`; see [`Recipe`]."""

    pipeline_class = "Lumina2Pipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = 256
    native_sizes = ((1024, 1024),)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions after the system prompt, and empty ones without it, as the pipeline its negative prompt."""
        text, empty = super().encode_text(captions), [not caption for caption in captions]
        if not any(empty):
            return text
        values, mask = self.pipeline._get_gemma_prompt_embeds(
            [""], device=self.pipeline.text_encoder.device, max_sequence_length=self.max_sequence_length
        )
        return text.replaced(empty, TextEmbeddings(values, mask))

    def shift(self) -> float:
        """Return the scheduler's shift, the same for all sizes: the pipeline counts the channels as tokens."""
        shift = super().shift()
        return shift if isinstance(shift, float) else shift(tokens=self.latent_channels, pixels=1)


RECIPES = (Lumina2Recipe,)
