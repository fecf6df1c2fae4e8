"""Ideogram 4."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Ideogram4Pipeline, Ideogram4Transformer2DModel

from tests.models.cases import SIZES, FamilyCase
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase

PADDING = 3


def make(**config: Any) -> Ideogram4Transformer2DModel:
    settings = {
        "in_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 12,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "adaln_dim": 8,
        "llm_features_dim": 16,
        "mrope_section": (2, 2, 2),
    }
    return Ideogram4Transformer2DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Put padding in front of the text, as the pipeline does, and take the negated velocity of the image."""
    channels, _, height, width = latent.shape
    start = PADDING + len(text)
    positions, segments, indicator = Ideogram4Pipeline._prepare_ids([len(text)], height, width, start, "cpu")
    tokens = latent.flatten(1).T[None]
    output = model(
        hidden_states=torch.cat([tokens.new_zeros(1, start, channels), tokens], 1),
        timestep=(1 - timestep[None] / 1000).to(latent.dtype),
        encoder_hidden_states=torch.cat(
            [text.new_zeros(PADDING, text.shape[1]), text, text.new_zeros(height * width, text.shape[1])]
        )[None],
        position_ids=positions,
        segment_ids=segments,
        indicator=indicator,
    ).sample
    return -output[0, start:].T.reshape(latent.shape)


CASES = {
    "ideogram4": FamilyCase(make=make, alone=alone, sizes=tuple((1, height, width) for _, height, width in SIZES))
}


@torch.no_grad()
def clean_tokens(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode an image to tokens `(1, h·w, 4·C)`, so that the pipeline's way of decoding them gives it back."""
    raw, statistics = pipeline.vae.encode(pixels[None, :, 0]).latent_dist.mode(), pipeline.vae.bn
    _, channels, height, width = raw.shape
    blocks = raw.view(1, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 3, 5, 1)
    deviation = torch.sqrt(statistics.running_var + pipeline.vae.config.batch_norm_eps)
    return (blocks.reshape(1, height * width // 4, -1) - statistics.running_mean) / deviation


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_tokens(pipeline, drawn.pixels), drawn.noise, drawn.timestep / 1000
    _, _, height, width = noise.shape
    tokens = noise.flatten(1).T[None]
    length = drawn.max_sequence_length
    embeds, positions, segments, indicator = pipeline.encode_prompt(drawn.caption, height, width, length, "cpu")
    noisy = (1 - sigma) * clean + sigma * tokens
    output = pipeline.transformer(
        hidden_states=torch.cat([noisy.new_zeros(1, length, noisy.shape[-1]), noisy], 1),
        timestep=1 - drawn.timestep[None] / 1000,
        encoder_hidden_states=embeds,
        position_ids=positions,
        segment_ids=segments,
        indicator=indicator,
    ).sample
    return (-output[:, length:] - (tokens - clean)).square().mean()


RECIPES = {
    "ideogram4": RecipeCase(
        tiny="ideogram4",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={
            "num_inference_steps": 2,
            "guidance_scale": 1.0,
            "guidance_schedule": None,
            "max_sequence_length": 64,
        },
    )
}
