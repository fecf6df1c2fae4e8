"""Pipelines of PixArt-α and PixArt-Σ with small random weights."""

from __future__ import annotations

from typing import Any

from diffusers import (
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)
from transformers import T5EncoderModel

from .components import CHANNELS, TEXT_DIM, image_vae, t5_components


def _components(**config: Any) -> dict[str, Any]:
    return {
        **t5_components(T5EncoderModel),
        "vae": image_vae(),
        "scheduler": DPMSolverMultistepScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02),
        "transformer": PixArtTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=24,
            in_channels=CHANNELS,
            out_channels=2 * CHANNELS,
            num_layers=4,
            cross_attention_dim=96,
            caption_channels=TEXT_DIM,
            **config,
        ),
    }


def _alpha() -> DiffusionPipeline:
    return PixArtAlphaPipeline(**_components(sample_size=128))


def _sigma() -> DiffusionPipeline:
    return PixArtSigmaPipeline(**_components(sample_size=64, use_additional_conditions=False))


TINY = {"pixart-alpha": _alpha, "pixart-sigma": _sigma}
