"""How Kandinsky 6 is trained: flow matching with a fixed shift, without sound; captions also pooled by CLIP."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from ...errors import BucketingError
from ..index import read_index
from ..kandinsky5.recipe import KandinskyRecipe
from ..recipe import Recipe
from ..texts import TextEmbeddings
from .packing import FAMILY


class Kandinsky6Recipe(KandinskyRecipe):
    """Recipe of `Kandinsky6TI2VAPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    Videos are trained from captions, without sound and without the image that the pipeline can begin them with.
    """

    pipeline_class = "Kandinsky6TI2VAPipeline"
    family = FAMILY
    default_sequence_length = 1024
    trims_text = True
    native_sizes = ((512, 768),)
    call_defaults = MappingProxyType({"sample_audio": False})

    @classmethod
    def load(cls, name_or_path: str, **options: Any) -> Recipe:
        """Load a pipeline, see [`Recipe.load`][hf_bucketing.models.recipe.Recipe.load]; refuse distilled ones."""
        if read_index(name_or_path).components["scheduler"].class_name == "PiflowScheduler":
            raise BucketingError(
                f"The model of {name_or_path} is distilled: it predicts a velocity for each step of a "
                "PiflowScheduler, where flow matching has one. Train the model that it was distilled from."
            )
        return super().load(name_or_path, **options)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions inside the pipeline's prompt template, whose own tokens it crops; pooled ones by CLIP."""
        values, pooled, mask, *_ = self._encode_prompt(captions)
        text = TextEmbeddings(values, None if mask is None else mask.long(), {"pooled_projections": pooled})
        return text.padded(self.max_sequence_length)


RECIPES = (Kandinsky6Recipe,)
