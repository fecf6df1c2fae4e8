"""Flux."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image

from tests.models.recipe_cases import CONTROL, IMAGES, REFERENCE, Drawn, RecipeCase, clean_image


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_image(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep / 1000
    _, channels, height, width = clean.shape
    tokens = pipeline._pack_latents((1 - sigma) * clean + sigma * noise, 1, channels, height, width)
    if "control" in drawn.shown:
        control = pipeline._pack_latents(clean_image(pipeline, drawn.shown["control"]), 1, channels, height, width)
        tokens = torch.cat([tokens, control], 2)
    embeds, pooled, text_ids = pipeline.encode_prompt(
        drawn.caption, None, max_sequence_length=drawn.max_sequence_length
    )
    ids = pipeline._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", clean.dtype)
    own = tokens.shape[1]
    for pixels in drawn.shown.get("reference", ()):
        latents = clean_image(pipeline, pixels)
        rows, columns = latents.shape[2:]
        tokens = torch.cat([tokens, pipeline._pack_latents(latents, 1, channels, rows, columns)], 1)
        shown_ids = pipeline._prepare_latent_image_ids(1, rows // 2, columns // 2, "cpu", clean.dtype)
        shown_ids[:, 0] = 1
        ids = torch.cat([ids, shown_ids])
    output = pipeline.transformer(
        hidden_states=tokens,
        timestep=drawn.timestep[None] / 1000,
        guidance=torch.full((1,), drawn.guidance),
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=ids,
    ).sample[:, :own]
    velocity = pipeline._unpack_latents(output, 8 * height, 8 * width, 8)
    return (velocity - (noise - clean)).square().mean()


RENDER = {"num_inference_steps": 2, "max_sequence_length": 64}
RECIPES = {
    "flux": RecipeCase(
        tiny="flux",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render=RENDER,
    ),
    "flux-control": RecipeCase(
        tiny="flux-control",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={**RENDER, "control_image": Image.new("RGB", (48, 32), "white")},
        shown=CONTROL,
        needs_shown=True,
    ),
    "flux-kontext": RecipeCase(
        tiny="flux-kontext",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={**RENDER, "image": Image.new("RGB", (64, 48), "white"), "max_area": 32 * 48, "_auto_resize": False},
        shown=REFERENCE,
        references=(((1, 16, 48),), (), ((1, 48, 32),)),
    ),
}
