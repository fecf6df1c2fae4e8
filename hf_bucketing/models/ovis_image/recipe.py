"""How Ovis-Image is trained: flow matching, shifted by size; text after a system prompt, with its padding."""

from __future__ import annotations

from typing import ClassVar

from ..recipe import Recipe
from .packing import FAMILY


class OvisImageRecipe(Recipe):
    """Recipe of `OvisImagePipeline`; see [`Recipe`]."""

    pipeline_class = "OvisImagePipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = 256
    native_sizes = ((1024, 1024),)
    prompt_outputs: ClassVar[tuple[str, ...]] = ("values",)


RECIPES = (OvisImageRecipe,)
