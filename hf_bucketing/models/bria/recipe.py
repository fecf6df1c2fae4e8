"""How Bria 3.2 is trained: flow matching with the scheduler's shift; text with zeros for its padding."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...devices import to_device
from ..recipe import Recipe
from ..texts import TextEmbeddings
from .packing import FAMILY


class BriaRecipe(Recipe):
    """Recipe of `BriaPipeline`; see [`Recipe`]."""

    pipeline_class = "BriaPipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = 128
    native_sizes = ((1024, 1024),)
    prompt_outputs: ClassVar[tuple[str, ...]] = ("values",)
    constructor_reads = ("vae", "trained")

    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions; an empty one is zeros, with which the pipeline guides where it has no negative prompt."""
        text = super().encode_text(captions)
        empty = to_device(torch.tensor([not caption for caption in captions]), text.values.device)
        return text._replace(values=text.values.masked_fill(empty[:, None, None], 0))


RECIPES = (BriaRecipe,)
