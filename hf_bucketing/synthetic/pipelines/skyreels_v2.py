"""Pipelines of SkyReels-V2 with small random weights."""

from __future__ import annotations

from typing import Any

from diffusers import (
    DiffusionPipeline,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2ImageToVideoPipeline,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
)

from .wan import TRANSFORMER, WITH_IMAGE_TOKENS, components, image_components


def _components(**config: Any) -> dict[str, Any]:
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
    transformer = SkyReelsV2Transformer3DModel(**{**TRANSFORMER, **config})
    return {**components(), "scheduler": scheduler, "transformer": transformer}


def _text_to_video() -> DiffusionPipeline:
    return SkyReelsV2Pipeline(**_components())


def _image_to_video() -> DiffusionPipeline:
    return SkyReelsV2ImageToVideoPipeline(**_components(**WITH_IMAGE_TOKENS), **image_components())


def _diffusion_forcing() -> DiffusionPipeline:
    return SkyReelsV2DiffusionForcingPipeline(**_components(inject_sample_info=True))


TINY = {
    "skyreels-v2": _text_to_video,
    "skyreels-v2-i2v": _image_to_video,
    "skyreels-v2-df": _diffusion_forcing,
}
