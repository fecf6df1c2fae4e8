"""A pipeline of LongCat-Image with small random weights."""

from __future__ import annotations

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    LongCatImagePipeline,
    LongCatImageTransformer2DModel,
)
from transformers import Qwen3VLForConditionalGeneration

from ...models.families.flux import BLOCK
from .components import TEXT_DIM, empty_pipeline, image_vae, qwen3_vl, template_tokenizer

_CHANNELS = 16
"""Channels of a latent, a number that the pipeline's call does not read from any configuration."""


def _text_to_image() -> DiffusionPipeline:
    tokenizer = template_tokenizer(empty_pipeline(LongCatImagePipeline).prompt_template_encode_prefix, 1)
    return LongCatImagePipeline(
        tokenizer=tokenizer,
        text_processor=None,  # which rewrites prompts, and needs torchvision
        text_encoder=qwen3_vl(len(tokenizer), kind=Qwen3VLForConditionalGeneration),
        vae=image_vae(shift_factor=0.1, latent_channels=_CHANNELS),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        transformer=LongCatImageTransformer2DModel(
            in_channels=_CHANNELS * BLOCK**2,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_DIM,
            pooled_projection_dim=TEXT_DIM,
            axes_dims_rope=(4, 6, 6),
        ),
    )


TINY = {"longcat-image": _text_to_image}
