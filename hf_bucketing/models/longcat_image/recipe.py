"""How LongCat-Image is trained: flow matching, shifted by size; text inside a chat template, with its padding."""

from __future__ import annotations

from typing import ClassVar

from ..recipe import Recipe
from .packing import FAMILY, TEXT_LENGTH


class LongCatImageRecipe(Recipe):
    """Recipe of `LongCatImagePipeline`; see [`Recipe`].

    The pipeline rewrites prompts by its text encoder (`enable_prompt_rewrite`); captions are trained as they are.
    """

    pipeline_class = "LongCatImagePipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = TEXT_LENGTH
    native_sizes = ((1024, 1024), (768, 1344), (1344, 768))
    prompt_outputs: ClassVar[tuple[str, ...]] = ("values",)


RECIPES = (LongCatImageRecipe,)
