"""A pipeline of Wan-Animate 2 with small random weights."""

from __future__ import annotations

from diffusers import WanAnimate2ModularPipeline, WanAnimate2Transformer3DModel
from transformers import CLIPVisionConfig, CLIPVisionModel

from .components import CHANNELS, TEXT_DIM
from .wan import WITH_CONDITION, components

_IMAGE_DIM = 1280
"""Channels of image tokens, which the transformer takes in any configuration."""


def _pipeline() -> WanAnimate2ModularPipeline:
    encoder = CLIPVisionConfig(
        hidden_size=_IMAGE_DIM, intermediate_size=16, num_hidden_layers=1, num_attention_heads=8, patch_size=112
    )
    pipeline = WanAnimate2ModularPipeline()
    pipeline.update_components(
        **components(),
        image_encoder=CLIPVisionModel(encoder).eval(),
        transformer=WanAnimate2Transformer3DModel(
            in_dim=WITH_CONDITION["in_channels"],
            dim=96,
            ffn_dim=128,
            freq_dim=64,
            text_dim=TEXT_DIM,
            out_dim=CHANNELS,
            num_heads=4,
            num_layers=2,
        ),
    )
    return pipeline


TINY = {"wan-animate-2": _pipeline}
