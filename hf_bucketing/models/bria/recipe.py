"""How Bria 3.2 is trained: flow matching with the scheduler's shift; text with zeros for its padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...devices import to_device
from ..loading import Loading
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

    @classmethod
    def load(cls, name_or_path: str, *, loading: Loading | None = None, **options: Any) -> Recipe:
        """Load a pipeline with its VAE and, where others have none, an empty transformer: the pipeline reads both."""
        loading = loading or Loading()
        loading = replace(
            loading, parts={*loading.parts, "vae", "trained"}, empty=loading.empty or "trained" not in loading.parts
        )
        return super().load(name_or_path, loading=loading, **options)

    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions; an empty one is zeros, with which the pipeline guides where it has no negative prompt."""
        text = super().encode_text(captions)
        empty = to_device(torch.tensor([not caption for caption in captions]), text.values.device)
        return text._replace(values=text.values.masked_fill(empty[:, None, None], 0))


RECIPES = (BriaRecipe,)
