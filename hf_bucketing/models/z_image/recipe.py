"""How Z-Image is trained: flow matching, with the scheduler's shift; captions in a chat template, without padding."""

from __future__ import annotations

import torch

from ...packing.texts import pad_texts
from ..recipe import Recipe
from ..texts import TextEmbeddings
from .packing import FAMILY


class ZImageRecipe(Recipe):
    """Recipe of `ZImagePipeline`; see [`Recipe`]."""

    pipeline_class = "ZImagePipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = 512
    native_sizes = ((1024, 1024),)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions in the tokenizer's chat template, and pad them to `max_sequence_length` for a mask."""
        texts, _ = self._encode_prompt(list(captions))  # which writes into the list
        values, mask = pad_texts(texts)
        return TextEmbeddings(values, mask.long()).padded(self.max_sequence_length)


RECIPES = (ZImageRecipe,)

REFUSED = {
    "ZImageOmniPipeline": (
        "it fills up each reference with learned tokens, and adds what SigLIP sees in it to the sequence of its sample"
    )
}
