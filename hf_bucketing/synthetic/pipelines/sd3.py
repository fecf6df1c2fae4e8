"""Pipelines of Stable Diffusion 3.5 with small random weights."""

from __future__ import annotations

from typing import Any

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from .components import CHANNELS, CLIP_DIM, TEXT_DIM, clip_components, image_vae, numbered, t5_components


def _pipeline(third: dict[str, Any]) -> DiffusionPipeline:
    return StableDiffusion3Pipeline(
        **clip_components(CLIPTextModelWithProjection),
        **numbered(clip_components(CLIPTextModelWithProjection), 2),
        **third,
        vae=image_vae(shift_factor=0.1),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=4,
            attention_head_dim=24,
            num_attention_heads=4,
            joint_attention_dim=TEXT_DIM,
            caption_projection_dim=96,
            pooled_projection_dim=2 * CLIP_DIM,
            pos_embed_max_size=96,
            qk_norm="rms_norm",
            dual_attention_layers=(0,),
        ),
    )


def _text_to_image() -> DiffusionPipeline:
    return _pipeline(numbered(t5_components(T5EncoderModel), 3))


def _without_t5() -> DiffusionPipeline:
    return _pipeline({"text_encoder_3": None, "tokenizer_3": None})


TINY = {"sd3": _text_to_image, "sd3-without-t5": _without_t5}
