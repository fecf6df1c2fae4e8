"""A pipeline of AuraFlow with small random weights."""

from __future__ import annotations

from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import UMT5EncoderModel

from .components import CHANNELS, TEXT_DIM, image_vae, t5_components


def _text_to_image() -> DiffusionPipeline:
    return AuraFlowPipeline(
        **t5_components(UMT5EncoderModel),
        vae=image_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        transformer=AuraFlowTransformer2DModel(
            sample_size=16,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_mmdit_layers=2,
            num_single_dit_layers=2,
            attention_head_dim=24,
            num_attention_heads=4,
            joint_attention_dim=TEXT_DIM,
            caption_projection_dim=96,
            pos_embed_max_size=64**2,
        ),
    )


TINY = {"auraflow": _text_to_image}
