"""Flux."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase, clean_image


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_image(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep / 1000
    _, channels, height, width = clean.shape
    embeds, pooled, text_ids = pipeline.encode_prompt(
        drawn.caption, None, max_sequence_length=drawn.max_sequence_length
    )
    output = pipeline.transformer(
        hidden_states=pipeline._pack_latents((1 - sigma) * clean + sigma * noise, 1, channels, height, width),
        timestep=drawn.timestep[None] / 1000,
        guidance=torch.ones(1),
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=pipeline._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", clean.dtype),
    ).sample
    velocity = pipeline._unpack_latents(output, 8 * height, 8 * width, 8)
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "flux": RecipeCase(
        tiny="flux",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={"num_inference_steps": 2, "max_sequence_length": 64},
    )
}
