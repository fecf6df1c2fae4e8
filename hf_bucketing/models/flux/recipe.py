"""How Flux is trained: flow matching, shifted by size; text with its padding, and the pooled text of CLIP."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from ...buckets.sizes import Size
from ..control import ControlRecipe
from ..recipe import Recipe
from .packing import FAMILY


class FluxRecipe(Recipe):
    """Recipe of `FluxPipeline`, for FLUX.1 [dev] and [schnell]; see [`Recipe`]."""

    pipeline_class = "FluxPipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = 512
    caption_tokenizer = "tokenizer_2"
    native_sizes: ClassVar[tuple[tuple[int, int], ...]] = ((1024, 1024),)
    guidance_factor: ClassVar[float | None] = 1.0
    prompt_outputs: ClassVar[tuple[str, ...]] = ("values", "pooled_projections")


class FluxControlRecipe(ControlRecipe, FluxRecipe):
    """Recipe of `FluxControlPipeline`, for FLUX.1 Canny and Depth [dev]; see [`ControlRecipe`].

    A pipeline of FLUX.1 [dev] whose `x_embedder` was widened to 128 channels, with zeros, begins a control of its own.
    """

    pipeline_class = "FluxControlPipeline"
    shown_as = MappingProxyType({"control": "control_image"})


_SIDES = (
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
)
"""Sides in pixels of FLUX.1 Kontext's own sizes but the square."""


class FluxKontextRecipe(FluxRecipe):
    """Recipe of `FluxKontextPipeline`, for FLUX.1 Kontext [dev], whose samples have one reference or none.

    A reference gets one of the pipeline's preferred sizes, as in its call. The pipeline makes its image one of them
    too; training and [`render`] keep its size.
    """

    pipeline_class = "FluxKontextPipeline"
    native_sizes = (*_SIDES, (1024, 1024), *((width, height) for height, width in _SIDES))
    max_references = 1
    reference_sizes = MappingProxyType({"shapes": native_sizes, "resample": "lanczos"})
    shown_as = MappingProxyType({"reference": "image"})

    @classmethod
    def size_arguments(cls, size: Size) -> dict[str, Any]:
        """Return the size as arguments of the pipeline's call, with the area that it would change it to."""
        return {**super().size_arguments(size), "max_area": size.height * size.width}

    @classmethod
    def reference_arguments(cls, references: Sequence[Sequence[Any]], size: Size) -> dict[str, Any]:
        """Return the reference, which has the size in which it is shown."""
        return {**super().reference_arguments(references, size), "_auto_resize": False}


RECIPES = (FluxRecipe, FluxControlRecipe, FluxKontextRecipe)
