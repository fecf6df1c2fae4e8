"""How SkyReels-V2 is trained, text-to-video and image-to-video: as Wan 2.1."""

from __future__ import annotations

from ..wan.recipe import WanImageToVideoRecipe, WanRecipe
from .packing import FAMILY


class SkyReelsV2Recipe(WanRecipe):
    """Recipe of `SkyReelsV2Pipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe]."""

    pipeline_class = "SkyReelsV2Pipeline"
    family = FAMILY
    native_sizes = ((544, 960), (720, 1280))


class SkyReelsV2ImageToVideoRecipe(WanImageToVideoRecipe):
    """Recipe of `SkyReelsV2ImageToVideoPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe]."""

    pipeline_class = "SkyReelsV2ImageToVideoPipeline"
    family = FAMILY
    native_sizes = ((544, 960), (720, 1280))


RECIPES = (SkyReelsV2Recipe, SkyReelsV2ImageToVideoRecipe)
