"""ChronoEdit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diffusers import ChronoEditTransformer3DModel

from tests.models import cases, cross_models
from tests.models.families.wan import IMAGE_TO_VIDEO


def make(**config: Any) -> ChronoEditTransformer3DModel:
    settings = {**cross_models.WAN, "in_channels": 6, "image_dim": 8, "added_kv_proj_dim": 24}
    return ChronoEditTransformer3DModel(**{**settings, **config})


CASES = {
    "chronoedit": replace(
        cases.WAN_IMAGE,
        make=make,
        alone=cross_models.wan_image_alone,
        sizes=((2, 4, 6), (1, 8, 4), (5, 6, 6), (1, 2, 2), (2, 10, 6), (3, 4, 6)),  # two frames: an edit
    )
}
RECIPES = {"chronoedit": replace(IMAGE_TO_VIDEO, tiny="chronoedit")}
