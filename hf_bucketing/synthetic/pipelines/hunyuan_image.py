"""Pipelines of HunyuanImage 2.1 with small random weights."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLHunyuanImage,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
)
from transformers import T5EncoderModel

from .components import CHANNELS, TEXT_DIM, latents_of_smooth_clips, numbered, qwen_components, t5_components


def _text_to_image() -> DiffusionPipeline:
    return HunyuanImagePipeline(
        **qwen_components(HunyuanImagePipeline),
        **numbered(t5_components(T5EncoderModel), 2),
        vae=_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=HunyuanImageTransformer2DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            guidance_embeds=True,
            text_embed_dim=TEXT_DIM,
            text_embed_2_dim=TEXT_DIM,
            rope_axes_dim=(8, 8),
        ),
    )


def _vae() -> AutoencoderKLHunyuanImage:
    width = 32  # its norms have 32 groups
    vae = AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=CHANNELS,
        block_out_channels=(width,) * 4,
        layers_per_block=1,
        spatial_compression_ratio=8,
        sample_size=64,
        scaling_factor=1.0,
    ).eval()
    vae.register_to_config(scaling_factor=1 / float(latents_of_smooth_clips(vae, images=True).std()))
    return vae


TINY = {"hunyuan-image": _text_to_image}
