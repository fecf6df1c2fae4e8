"""How CogView3-Plus is trained: denoising of velocities on its own schedule; sizes as conditions."""

from __future__ import annotations

from typing import Any

from ..cogview4.recipe import sizes_of
from ..recipe import Recipe
from ..samples import Samples
from .packing import FAMILY


class CogView3PlusRecipe(Recipe):
    """Recipe of `CogView3PlusPipeline`; see [`Recipe`]. The pipeline cannot load LoRA weights."""

    pipeline_class = "CogView3PlusPipeline"
    family = FAMILY
    denoises = True
    image_vae = True
    default_sequence_length = 224
    prompt_outputs = ("values",)
    native_sizes = ((1024, 1024),)

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the sizes and the corner that the pipeline passes by default: those of the whole image."""
        return sizes_of(samples, self.spec.spatial_stride)


RECIPES = (CogView3PlusRecipe,)
