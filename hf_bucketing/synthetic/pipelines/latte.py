"""A pipeline of Latte with small random weights."""

from __future__ import annotations

from diffusers import DDPMScheduler, DiffusionPipeline, LattePipeline, LatteTransformer3DModel
from transformers import T5EncoderModel

from .components import CHANNELS, TEXT_DIM, image_vae, t5_components


def _text_to_video() -> DiffusionPipeline:
    return LattePipeline(
        **t5_components(T5EncoderModel),
        vae=image_vae(),
        scheduler=DDPMScheduler(beta_schedule="linear", variance_type="learned_range", clip_sample=False),
        transformer=LatteTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=24,
            in_channels=CHANNELS,
            out_channels=2 * CHANNELS,
            num_layers=2,
            cross_attention_dim=96,
            attention_bias=True,
            sample_size=8,
            patch_size=2,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            caption_channels=TEXT_DIM,
            video_length=16,
        ),
    )


TINY = {"latte": _text_to_video}
