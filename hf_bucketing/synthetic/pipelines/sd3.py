"""Pipelines of Stable Diffusion 3.5 and AuraFlow with small random weights."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextModelWithProjection, T5EncoderModel, UMT5EncoderModel

from .components import CHANNELS, CLIP_DIM, TEXT_DIM, clip_components, image_vae, numbered, t5_components

_TRANSFORMER = {
    "sample_size": 16,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "joint_attention_dim": TEXT_DIM,
    "caption_projection_dim": 96,
}


def _sd3(third: dict[str, Any]) -> DiffusionPipeline:
    return StableDiffusion3Pipeline(
        **clip_components(CLIPTextModelWithProjection),
        **numbered(clip_components(CLIPTextModelWithProjection), 2),
        **third,
        vae=image_vae(shift_factor=0.1),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=SD3Transformer2DModel(
            patch_size=2,
            num_layers=4,
            pooled_projection_dim=2 * CLIP_DIM,
            pos_embed_max_size=96,
            qk_norm="rms_norm",
            dual_attention_layers=(0,),
            **_TRANSFORMER,
        ),
    )


def _with_t5() -> DiffusionPipeline:
    return _sd3(numbered(t5_components(T5EncoderModel), 3))


def _without_t5() -> DiffusionPipeline:
    return _sd3({"text_encoder_3": None, "tokenizer_3": None})


def _auraflow() -> DiffusionPipeline:
    return AuraFlowPipeline(
        **t5_components(UMT5EncoderModel),
        vae=image_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        transformer=AuraFlowTransformer2DModel(
            num_mmdit_layers=2, num_single_dit_layers=2, pos_embed_max_size=64**2, **_TRANSFORMER
        ),
    )


TINY = {"sd3": _with_t5, "sd3-without-t5": _without_t5, "auraflow": _auraflow}
