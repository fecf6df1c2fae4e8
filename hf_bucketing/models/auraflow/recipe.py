"""How AuraFlow is trained: flow matching with one shift; text with its padding as zeros."""

from __future__ import annotations

from ..recipe import Recipe
from .packing import FAMILY


class AuraFlowRecipe(Recipe):
    """Recipe of `AuraFlowPipeline`; see [`Recipe`]."""

    pipeline_class = "AuraFlowPipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = 256
    added_text_tokens = 8
    """The model's registers."""
    native_sizes = ((1024, 1024),)


RECIPES = (AuraFlowRecipe,)
