"""Bria 3.2."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import BriaPipeline, BriaTransformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase


def make(**config: Any) -> BriaTransformer2DModel:
    settings = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    }
    return BriaTransformer2DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    channels, _, height, width = latent.shape
    output = model(
        hidden_states=BriaPipeline._pack_latents(latent.transpose(0, 1), 1, channels, height, width),
        timestep=timestep[None],
        encoder_hidden_states=text[None],
        txt_ids=torch.zeros(len(text), 3),
        img_ids=BriaPipeline._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", torch.float32),
    ).sample
    return BriaPipeline._unpack_latents(output, 16 * (height // 2), 16 * (width // 2), 16).transpose(0, 1)


CASES = {"bria": FamilyCase(make=make, alone=alone, sizes=IMAGE_SIZES)}
