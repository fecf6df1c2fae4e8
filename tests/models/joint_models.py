"""Small models of the families with joint attention, and the stock calls for one sample of each."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    SD3Transformer2DModel,
)


def make_sd3(**config: Any) -> SD3Transformer2DModel:
    settings = {
        "sample_size": 16,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 20,
        "pos_embed_max_size": 64,
    }
    return SD3Transformer2DModel(**{**settings, **config})


def make_sd35(**config: Any) -> SD3Transformer2DModel:
    return make_sd3(**{"qk_norm": "rms_norm", "dual_attention_layers": (0,), **config})


def sd3_alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, *, pooled_projections: torch.Tensor
) -> torch.Tensor:
    output = model(latent[:, 0][None], text[None], pooled_projections[None], timestep[None]).sample
    return output[0][:, None]


COGVIDEOX_SETTINGS = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "time_embed_dim": 16,
    "text_embed_dim": 16,
    "max_text_seq_length": 7,
    "use_rotary_positional_embeddings": True,
    "sample_width": 12,
    "sample_height": 10,
    "sample_frames": 9,
}


def make_cogvideox(**config: Any) -> CogVideoXTransformer3DModel:
    return CogVideoXTransformer3DModel(**{**COGVIDEOX_SETTINGS, **config})


def make_cogvideox_sincos(**config: Any) -> CogVideoXTransformer3DModel:
    return make_cogvideox(**{"use_rotary_positional_embeddings": False, **config})


def make_cogvideox_learned(**config: Any) -> CogVideoXTransformer3DModel:
    return make_cogvideox(**{"use_learned_positional_embeddings": True, "in_channels": 8, **config})


def make_cogvideox_15(**config: Any) -> CogVideoXTransformer3DModel:
    return make_cogvideox(**{"patch_size_t": 2, "patch_bias": False, "ofs_embed_dim": 16, **config})


class _PositionsOfThePipeline(CogVideoXPipeline):
    """The pipeline's own rotary positions, without its other components."""

    def __init__(self, transformer: CogVideoXTransformer3DModel) -> None:
        self.transformer, self.vae_scale_factor_spatial = transformer, 8


def cogvideox_rotary(model: Any, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    frames, height, width = latent.shape[1:]
    positions = _PositionsOfThePipeline(model)._prepare_rotary_positional_embeddings
    return positions(8 * height, 8 * width, frames, torch.device("cpu"))


def cogvideox_alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, *, ofs: torch.Tensor | None = None
) -> torch.Tensor:
    rotary = cogvideox_rotary(model, latent) if model.config.use_rotary_positional_embeddings else None
    output = model(
        latent.transpose(0, 1)[None],
        text[None],
        timestep[None],
        ofs=None if ofs is None else ofs[None],
        image_rotary_emb=rotary,
    ).sample
    return output[0].transpose(0, 1)


def make_hunyuan(**config: Any) -> HunyuanVideoTransformer3DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 2,
        "patch_size": 2,
        "patch_size_t": 1,
        "text_embed_dim": 16,
        "pooled_projection_dim": 20,
        "rope_axes_dim": (4, 6, 6),
    }
    return HunyuanVideoTransformer3DModel(**{**settings, **config})


def hunyuan_alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **conditioning: torch.Tensor
) -> torch.Tensor:
    rest = {name: values[None] for name, values in conditioning.items()}
    mask = torch.ones(1, len(text), dtype=text.dtype)
    return model(latent[None], timestep[None], text[None], mask, **rest).sample[0]


def make_flux(**config: Any) -> FluxTransformer2DModel:
    settings = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 20,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 6, 6),
    }
    return FluxTransformer2DModel(**{**settings, **config})


def flux_ids(latent: torch.Tensor) -> torch.Tensor:
    height, width = latent.shape[2:]
    return FluxPipeline._prepare_latent_image_ids(1, height // 2, width // 2, latent.device, latent.dtype)


def flux_alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **conditioning: torch.Tensor
) -> torch.Tensor:
    channels, _, height, width = latent.shape
    output = model(
        FluxPipeline._pack_latents(latent.transpose(0, 1), 1, channels, height, width),
        encoder_hidden_states=text[None],
        timestep=timestep[None] / 1000,
        img_ids=flux_ids(latent),
        txt_ids=torch.zeros(len(text), 3),
        **{name: values[None] for name, values in conditioning.items()},
    ).sample
    return FluxPipeline._unpack_latents(output, 8 * height, 8 * width, 8).transpose(0, 1)
