"""How Z-Image is trained: flow matching, with the scheduler's shift; captions in a chat template, without padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from ..recipe import Recipe, TextEmbeddings
from .packing import FAMILY, PATCH


class ZImageRecipe(Recipe):
    """Recipe of `ZImagePipeline`; see [`Recipe`]."""

    pipeline_class = "ZImagePipeline"
    family = FAMILY
    image_vae = True
    token_side = PATCH  # with which the pipeline calls the transformer
    default_sequence_length = 512
    native_sizes = ((1024, 1024),)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions in the tokenizer's chat template, and pad them to `max_sequence_length` for a mask."""
        texts, _ = self._encode_prompt(list(captions), do_classifier_free_guidance=False)  # which writes into the list
        values = pad_sequence(texts, batch_first=True)
        mask = pad_sequence([text.new_ones(len(text), dtype=torch.long) for text in texts], batch_first=True)
        missing = self.max_sequence_length - values.shape[1]
        return TextEmbeddings(F.pad(values, (0, 0, 0, missing)), F.pad(mask, (0, missing)))


RECIPES = (ZImageRecipe,)
