"""Qwen-Image."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.families.wan import clean_latent
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase


def make(**config: Any) -> QwenImageTransformer2DModel:
    settings = {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    }
    return QwenImageTransformer2DModel(**{**settings, **config})


def alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, *, padding: int = 0
) -> torch.Tensor:
    channels, _, height, width = latent.shape
    padded = torch.cat([text, 7 * torch.ones(padding, text.shape[1]).to(text)])
    mask = torch.tensor([1] * len(text) + [0] * padding)
    output = model(
        hidden_states=QwenImagePipeline._pack_latents(latent.transpose(0, 1), 1, channels, height, width),
        timestep=timestep[None] / 1000,
        encoder_hidden_states_mask=mask[None] if padding else None,
        encoder_hidden_states=padded[None],
        img_shapes=[[(1, height // 2, width // 2)]],
    ).sample
    return QwenImagePipeline._unpack_latents(output, 8 * height, 8 * width, 8)[0]


CASES = {
    "qwen-image": FamilyCase(
        make=make,
        alone=alone,
        sizes=IMAGE_SIZES,
        # the last block's text goes nowhere
        without_gradient=("1.attn.add_q_proj", "1.attn.norm_added_q", "1.attn.to_add_out", "1.txt_mlp"),
    ),
}
CASES["qwen-image clean condition"] = replace(
    CASES["qwen-image"], make=partial(make, zero_cond_t=True), alone=partial(alone, padding=3)
)


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_latent(pipeline, drawn.pixels), drawn.noise[None], drawn.timestep / 1000
    _, channels, _, height, width = clean.shape
    embeds, mask = pipeline.encode_prompt(drawn.caption, max_sequence_length=drawn.max_sequence_length)
    output = pipeline.transformer(
        hidden_states=pipeline._pack_latents((1 - sigma) * clean + sigma * noise, 1, channels, height, width),
        timestep=drawn.timestep[None] / 1000,
        encoder_hidden_states_mask=mask,
        encoder_hidden_states=embeds,
        img_shapes=[[(1, height // 2, width // 2)]],
    ).sample
    velocity = pipeline._unpack_latents(output, 8 * height, 8 * width, 8)
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "qwen-image": RecipeCase(
        tiny="qwen-image",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={"num_inference_steps": 2, "max_sequence_length": 64},
    )
}
