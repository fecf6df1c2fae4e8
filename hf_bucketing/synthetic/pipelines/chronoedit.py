"""A pipeline of ChronoEdit with small random weights."""

from __future__ import annotations

from diffusers import ChronoEditPipeline, ChronoEditTransformer3DModel, DiffusionPipeline

from .wan import TRANSFORMER, WITH_IMAGE_TOKENS, components, image_components


def _edit() -> DiffusionPipeline:
    transformer = ChronoEditTransformer3DModel(**{**TRANSFORMER, **WITH_IMAGE_TOKENS})
    return ChronoEditPipeline(**components(), **image_components(), transformer=transformer)


TINY = {"chronoedit": _edit}
