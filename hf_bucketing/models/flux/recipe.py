"""How Flux is trained: flow matching, shifted by size; text with its padding, and the pooled text of CLIP."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar

from ..control import ControlRecipe
from ..recipe import Recipe
from .packing import FAMILY


class FluxRecipe(Recipe):
    """Recipe of `FluxPipeline`, for FLUX.1 [dev] and [schnell]; see [`Recipe`]."""

    pipeline_class = "FluxPipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = 512
    native_sizes = ((1024, 1024),)
    guidance_factor: ClassVar[float | None] = 1.0
    prompt_outputs: ClassVar[tuple[str, ...]] = ("values", "pooled_projections")


class FluxControlRecipe(ControlRecipe, FluxRecipe):
    """Recipe of `FluxControlPipeline`, for FLUX.1 Canny and Depth [dev]; see [`ControlRecipe`].

    A pipeline of FLUX.1 [dev] whose `x_embedder` was widened to 128 channels, with zeros, begins a control of its own.
    """

    pipeline_class = "FluxControlPipeline"
    shown_as = MappingProxyType({"control": "control_image"})


RECIPES = (FluxRecipe, FluxControlRecipe)
