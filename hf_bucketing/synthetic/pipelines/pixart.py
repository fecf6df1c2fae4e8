"""Pipelines of PixArt-α, PixArt-Σ and Latte with small random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import (
    DDPMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    LattePipeline,
    LatteTransformer3DModel,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)
from transformers import T5EncoderModel

from .components import CHANNELS, TEXT_DIM, image_vae, t5_components

_TRANSFORMER = {
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "in_channels": CHANNELS,
    "out_channels": 2 * CHANNELS,
    "cross_attention_dim": 96,
    "caption_channels": TEXT_DIM,
}


def _pixart(kind: type[DiffusionPipeline], **config: Any) -> DiffusionPipeline:
    return kind(
        **t5_components(T5EncoderModel),
        vae=image_vae(),
        scheduler=DPMSolverMultistepScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02),
        transformer=PixArtTransformer2DModel(num_layers=4, **_TRANSFORMER, **config),
    )


def _latte() -> DiffusionPipeline:
    return LattePipeline(
        **t5_components(T5EncoderModel),
        vae=image_vae(),
        scheduler=DDPMScheduler(beta_schedule="linear", variance_type="learned_range", clip_sample=False),
        transformer=LatteTransformer3DModel(
            num_layers=2,
            attention_bias=True,
            sample_size=8,
            patch_size=2,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            video_length=16,
            **_TRANSFORMER,
        ),
    )


TINY = {
    "pixart-alpha": partial(_pixart, PixArtAlphaPipeline, sample_size=128),
    "pixart-sigma": partial(_pixart, PixArtSigmaPipeline, sample_size=64, use_additional_conditions=False),
    "latte": _latte,
}
