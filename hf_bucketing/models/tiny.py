"""Components of pipelines with small random weights, for the demo and tests: text encoders, VAEs, schedulers."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLWan
from transformers import ByT5Tokenizer, T5EncoderModel, UMT5EncoderModel

CHANNELS = 4
"""Channels of a latent."""
TEXT_DIM = 32
"""Channels of a text embedding."""


def t5_components(encoder: type[T5EncoderModel | UMT5EncoderModel]) -> dict[str, Any]:
    """Return a tokenizer that works on bytes and needs no vocabulary file, and a T5 of two layers."""
    tokenizer = ByT5Tokenizer()
    shape = {"d_model": TEXT_DIM, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = encoder.config_class(vocab_size=len(tokenizer), **shape)
    return {"tokenizer": tokenizer, "text_encoder": encoder(config).eval()}


def wan_vae(**config: Any) -> AutoencoderKLWan:
    """Return a VAE of Wan, by default 2.1, whose latents have mean 0 and deviation 1, as those of the trained one."""
    settings = {"base_dim": 8, "z_dim": CHANNELS, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    ones = {"latents_mean": [0.0] * CHANNELS, "latents_std": [1.0] * CHANNELS}
    vae = AutoencoderKLWan(**settings, **ones, **config).eval()
    latents = latents_of_smooth_clips(vae)
    vae.register_to_config(latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist())
    return vae


def image_vae(**config: Any) -> AutoencoderKL:
    """Return a VAE of images whose latents have deviation 1, once scaled."""
    vae = AutoencoderKL(
        **{
            "block_out_channels": (8,) * 4,
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
            "latent_channels": CHANNELS,
            "norm_num_groups": 4,
            **config,
        }
    ).eval()
    vae.register_to_config(scaling_factor=1 / float(latents_of_smooth_clips(vae, images=True).std()))
    return vae


@torch.no_grad()
def latents_of_smooth_clips(vae: Any, *, images: bool = False) -> torch.Tensor:
    """Return the latents of eight random smooth clips of 5×64×64 pixels, or of their first frames: `(C, numbers)`."""
    coarse = torch.rand(8, 3, 3, 6, 6) * 2 - 1
    clips = torch.nn.functional.interpolate(coarse, size=(5, 64, 64), mode="trilinear")
    pixels = clips[:, :, 0] if images else clips
    latents: torch.Tensor = vae.encode(pixels).latent_dist.mode().transpose(0, 1).flatten(1)
    return latents
