"""How HunyuanVideo is trained: flow matching with a fixed shift; a prompt template around captions."""

from __future__ import annotations

from ..recipe import Recipe
from .packing import FAMILY


class HunyuanVideoRecipe(Recipe):
    """Recipe of `HunyuanVideoPipeline`; see [`Recipe`]."""

    pipeline_class = "HunyuanVideoPipeline"
    family = FAMILY
    default_sequence_length = 256
    guidance_factor = 1000.0
    prompt_outputs = ("values", "pooled_projections", "mask")
    native_sizes = ((544, 960), (624, 832), (720, 720), (720, 1280), (832, 1104), (960, 960))
    """The sizes of 540p and 720p on the model card; it also names their portrait counterparts."""


RECIPES = (HunyuanVideoRecipe,)
