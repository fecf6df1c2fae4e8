"""Pipelines of Mochi with small random weights."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLMochi,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    MochiPipeline,
    MochiTransformer3DModel,
)
from transformers import T5EncoderModel

from .components import TEXT_DIM, t5_components, with_statistics

CHANNELS = 12
"""Channels of a latent, of which the pipeline expects twelve."""


def _text_to_video() -> DiffusionPipeline:
    return MochiPipeline(
        **t5_components(T5EncoderModel),
        vae=_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        transformer=MochiTransformer3DModel(
            in_channels=CHANNELS,
            num_attention_heads=4,
            attention_head_dim=16,
            num_layers=2,
            pooled_projection_dim=24,
            text_embed_dim=TEXT_DIM,
            time_embed_dim=32,
        ),
        force_zeros_for_empty_prompt=True,
    )


def _vae() -> AutoencoderKLMochi:
    channels, layers = (32,) * 4, (1,) * 5  # its norms have 32 groups
    vae = AutoencoderKLMochi(
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        layers_per_block=layers,
        latents_mean=(0.0,) * CHANNELS,
        latents_std=(1.0,) * CHANNELS,
    ).eval()
    return with_statistics(vae)


TINY = {"mochi": _text_to_video}
