"""Krea 2."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Krea2Pipeline, Krea2Transformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.families.wan import clean_latent
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase

LAYERS = 2


def make(**config: Any) -> Krea2Transformer2DModel:
    settings = {
        "in_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "timestep_embed_dim": 16,
        "text_hidden_dim": 16 // LAYERS,
        "num_text_layers": LAYERS,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 1,
        "text_intermediate_size": 16,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": (2, 2, 4),
    }
    return Krea2Transformer2DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Put padding into the text, as the pipeline does, which attention must not see."""
    channels, _, height, width = latent.shape
    half = len(text) // 2
    padded = torch.cat([text[:half], 7 * torch.ones_like(text[:1]), text[half:]])
    output = model(
        hidden_states=_tokens(latent),
        timestep=timestep[None] / 1000,
        encoder_hidden_states=padded.unflatten(-1, (LAYERS, -1))[None],
        position_ids=Krea2Pipeline.prepare_position_ids(len(padded), height // 2, width // 2, "cpu"),
        encoder_attention_mask=(torch.arange(len(padded)) != half)[None],
    ).sample
    blocks = output[0].view(height // 2, width // 2, channels, 2, 2)
    return blocks.permute(2, 0, 3, 1, 4).reshape(channels, 1, height, width)


def _tokens(latent: torch.Tensor) -> torch.Tensor:
    channels, _, height, width = latent.shape
    blocks = latent.view(1, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return blocks.reshape(1, height * width // 4, channels * 4)


CASES = {"krea2": FamilyCase(make=make, alone=alone, sizes=IMAGE_SIZES, empty_text=False)}


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_latent(pipeline, drawn.pixels), drawn.noise[None], drawn.timestep / 1000
    _, channels, _, height, width = clean.shape
    embeds, mask = pipeline.encode_prompt(drawn.caption, max_sequence_length=drawn.max_sequence_length)
    output = pipeline.transformer(
        hidden_states=pipeline._pack_latents((1 - sigma) * clean + sigma * noise, 1, channels, height, width),
        encoder_hidden_states=embeds,
        timestep=drawn.timestep[None] / 1000,
        position_ids=pipeline.prepare_position_ids(embeds.shape[1], height // 2, width // 2, "cpu"),
        encoder_attention_mask=mask,
    ).sample
    velocity = pipeline._unpack_latents(output, 8 * height, 8 * width)
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "krea2": RecipeCase(
        tiny="krea2",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={"num_inference_steps": 2, "guidance_scale": 0.0, "max_sequence_length": 64},
    )
}
