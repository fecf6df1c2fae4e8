"""How SkyReels-V2 is trained: as Wan 2.1, text-to-video and image-to-video, or by diffusion forcing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...conditions.shares import FRAMES
from ..objectives import DiffusionForcing
from ..samples import Samples
from ..wan.recipe import WanImageToVideoRecipe, WanRecipe
from .packing import FAMILY, FPS


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


class SkyReelsV2DiffusionForcingRecipe(SkyReelsV2Recipe):
    """Recipe of `SkyReelsV2DiffusionForcingPipeline`: each latent frame has a noise level of its own; see [`Recipe`].

    Models that embed the frame rate (`inject_sample_info`) tell 16 frames per second from others, which include
    images, and do not run both in one batch or pack: train them apart.
    """

    pipeline_class = "SkyReelsV2DiffusionForcingPipeline"
    flow = DiffusionForcing

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """Whole frames, each of which has a timestep."""
        return FRAMES

    @classmethod
    def has_clean_parts(cls, settings: Mapping[str, Any], *, draws: bool) -> bool:
        """Return True: every latent frame has a timestep."""
        return True

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the number of each sample's frame rate, for models that embed it."""
        return {FPS: (samples.fps != 16).long()} if self.config["inject_sample_info"] else {}


RECIPES = (SkyReelsV2Recipe, SkyReelsV2ImageToVideoRecipe, SkyReelsV2DiffusionForcingRecipe)
