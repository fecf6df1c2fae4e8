"""Qwen-Image 2.1."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import QwenImage21Pipeline, QwenImage21Transformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.families.wan import clean_latent
from tests.models.recipe_cases import BLOCKS_OF_32, Drawn, RecipeCase


def make(**config: Any) -> QwenImage21Transformer2DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "context_in_dim": 16,
        "mlp_ratio": 2,
        "axes_dims_rope": (4, 6, 6),
    }
    return QwenImage21Transformer2DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return _velocity(model, latent[None], timestep, text[None], None)[0]


def _velocity(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    _, channels, _, height, width = latent.shape
    slots = torch.ones(1, height * width // 4, dtype=torch.bool)
    output = model(
        hidden_states=QwenImage21Pipeline._pack_latents(latent, 1, channels, height, width),
        timestep=timestep[None] / 1000,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, height, width)]],
        img_mask=torch.cat([torch.zeros(text.shape[:2], dtype=torch.bool), slots], 1),
    ).sample
    return QwenImage21Pipeline._unpack_latents(output[:, -height * width :], 16 * height, 16 * width, 16)


CASES = {"qwen-image-2.1": FamilyCase(make=make, alone=alone, sizes=IMAGE_SIZES, empty_text=False, shortest_strip=4)}


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    opaque = torch.cat([drawn.pixels, torch.ones_like(drawn.pixels[:1])])
    clean, noise, sigma = clean_latent(pipeline, opaque), drawn.noise[None], drawn.timestep / 1000
    embeds, mask, _ = pipeline.encode_prompt(drawn.caption)
    noisy = (1 - sigma) * clean + sigma * noise
    velocity = _velocity(pipeline.transformer, noisy, drawn.timestep, embeds, mask)
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "qwen-image-2.1": RecipeCase(
        tiny="qwen-image-2.1",
        loss=text_to_image_loss,
        sizes=((1, 32, 64), (1, 64, 64), (1, 64, 32)),
        buckets=BLOCKS_OF_32,
        render={"num_inference_steps": 2},
        max_sequence_length=96,  # each letter of the template is a token
    )
}
