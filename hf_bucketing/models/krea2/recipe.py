"""How Krea 2 is trained: flow matching, shifted by size, distilled models by one shift; text in a template, masked."""

from __future__ import annotations

import math

import torch

from ...packing.texts import apply_text_mask, pad_texts
from ..qwen_image.recipe import QwenImageRecipe
from ..recipe import Recipe
from ..shift import ShiftLaw
from ..texts import TextEmbeddings
from .packing import FAMILY

DISTILLED_SHIFT = math.exp(1.15)
"""Shift with which the pipeline calls distilled models (`is_distilled`), whatever the size."""


class Krea2Recipe(Recipe):
    """Recipe of `Krea2Pipeline`; see [`Recipe`]."""

    pipeline_class = "Krea2Pipeline"
    family = FAMILY
    default_sequence_length = 512
    trims_text = True
    native_sizes = ((1024, 1024),)
    vae_strides = QwenImageRecipe.vae_strides

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions in the pipeline's template, with the layers of a token side by side.

        The pipeline puts padding inside a text and masks it. Here it follows the text, so that it can be trimmed:
        all tokens of a text have one position, and their order makes no difference.
        """
        values, mask = self._encode_prompt(captions)
        values, mask = pad_texts(apply_text_mask("masked", values.flatten(2), mask=mask))
        return TextEmbeddings(values, mask.long()).padded(self.max_sequence_length)

    def shift(self) -> float | ShiftLaw:
        """Return the shift by size, or that of distilled models."""
        return DISTILLED_SHIFT if self.pipeline.config.is_distilled else super().shift()


RECIPES = (Krea2Recipe,)
