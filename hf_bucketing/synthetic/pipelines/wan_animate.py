"""A pipeline of Wan-Animate with small random weights."""

from __future__ import annotations

from diffusers import WanAnimatePipeline, WanAnimateTransformer3DModel

from .components import CHANNELS
from .wan import TRANSFORMER, WITH_IMAGE_TOKENS, components, image_components

FACE_SIDE = 16
"""Height and width of a face in pixels."""


def _pipeline() -> WanAnimatePipeline:
    encoders = {
        "motion_encoder_channel_sizes": dict.fromkeys(("4", "8", str(FACE_SIDE)), 8),
        "motion_encoder_size": FACE_SIDE,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 8,
        "face_encoder_hidden_dim": 8,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 2,
    }
    config = {**TRANSFORMER, **WITH_IMAGE_TOKENS, **encoders, "latent_channels": CHANNELS}
    model = WanAnimateTransformer3DModel(**config)
    return WanAnimatePipeline(**components(), **image_components(), transformer=model)


TINY = {"wan-animate": _pipeline}
