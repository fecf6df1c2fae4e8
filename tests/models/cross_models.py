"""Small models of the families with cross-attention, and the stock calls for one sample of each."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    CosmosTransformer3DModel,
    LatteTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    PixArtTransformer2DModel,
    WanTransformer3DModel,
)

SINCOS = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "cross_attention_dim": 48,
    "attention_bias": True,
    "sample_size": 16,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "caption_channels": 16,
}


def make_latte(**config: Any) -> LatteTransformer3DModel:
    return LatteTransformer3DModel(**{**SINCOS, "video_length": 5, **config})


def latte_alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    table = model.temp_pos_embed
    model.temp_pos_embed = table[:, : latent.shape[1]]  # the stock model runs videos of exactly video_length frames
    try:
        return model(latent[None], timestep=timestep[None], encoder_hidden_states=text[None]).sample[0]
    finally:
        model.temp_pos_embed = table


def make_pixart(**config: Any) -> PixArtTransformer2DModel:
    return PixArtTransformer2DModel(**{**SINCOS, **config})


def pixart_alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **added: torch.Tensor
) -> torch.Tensor:
    padded = torch.cat([text, text.new_full((3, text.shape[1]), 7.0)])[None]
    return model(
        latent[None, :, 0],
        encoder_hidden_states=padded,
        encoder_attention_mask=torch.arange(len(text) + 3)[None] < len(text),
        timestep=timestep[None],
        added_cond_kwargs={name: value[None] for name, value in added.items()},
    ).sample[0][:, None]


def make_ltx(**config: Any) -> LTXVideoTransformer3DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "cross_attention_dim": 32,
        "num_layers": 2,
        "caption_channels": 16,
    }
    return LTXVideoTransformer3DModel(**{**settings, **config})


def ltx_alone(
    model: Any,
    latent: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    rope_interpolation_scale: torch.Tensor,
) -> torch.Tensor:
    sides = {"patch_size": model.config.patch_size, "patch_size_t": model.config.patch_size_t}
    frames, height, width = latent.shape[1:]
    t, h, w = frames // sides["patch_size_t"], height // sides["patch_size"], width // sides["patch_size"]
    output = model(
        LTXPipeline._pack_latents(latent[None], **sides),
        encoder_hidden_states=torch.cat([text, text.new_full((3, text.shape[1]), 7.0)])[None],
        timestep=timestep[None],
        encoder_attention_mask=(torch.arange(len(text) + 3)[None] < len(text)).to(text.dtype),
        num_frames=t,
        height=h,
        width=w,
        rope_interpolation_scale=tuple(rope_interpolation_scale.tolist()),
    ).sample
    return LTXPipeline._unpack_latents(output, t, h, w, **sides)[0]


WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 48,
    "num_layers": 2,
    "cross_attn_norm": True,
    "rope_max_seq_len": 64,
}
"""Configuration of a small Wan, which its variants share."""


def make_wan(**config: Any) -> WanTransformer3DModel:
    return WanTransformer3DModel(**{**WAN, **config})


def wan_alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return model(latent[None], timestep[None], text[None]).sample[0]


def make_wan_image(**config: Any) -> WanTransformer3DModel:
    return make_wan(**{"in_channels": 6, "image_dim": 8, "added_kv_proj_dim": 24, **config})


def wan_image_alone(
    model: Any,
    latent: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    encoder_hidden_states_image: torch.Tensor,
) -> torch.Tensor:
    frames = 1 if model.config.pos_embed_seq_len is None else 2
    image = encoder_hidden_states_image.view(frames, -1, encoder_hidden_states_image.shape[-1])
    return model(latent[None], timestep[None], text[None], image).sample[0]


def make_cosmos(**config: Any) -> CosmosTransformer3DModel:
    settings = {
        "num_attention_heads": 2,
        "attention_head_dim": 18,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "text_embed_dim": 16,
        "adaln_lora_dim": 8,
        "max_size": (16, 128, 128),
        "concat_padding_mask": False,
    }
    return CosmosTransformer3DModel(**{**settings, **config})


def cosmos_alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, *, fps: torch.Tensor
) -> torch.Tensor:
    mask = torch.zeros(1, 1, *latent.shape[2:])
    timestep = timestep.view(latent.shape[1], -1)[None, None, :, :1, None] if timestep.ndim else timestep[None]
    return model(latent[None], timestep, text[None], fps=float(fps), padding_mask=mask).sample[0]
