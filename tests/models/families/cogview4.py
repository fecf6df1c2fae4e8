"""CogView4."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import CogView4Transformer2DModel
from PIL import Image

from tests.models.cases import IMAGE_SIZES, Draw, FamilyCase
from tests.models.recipe_cases import CONTROL, IMAGES, Drawn, RecipeCase, clean_image


def make(**config: Any) -> CogView4Transformer2DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "text_embed_dim": 16,
        "time_embed_dim": 24,
        "condition_dim": 8,
    }
    return CogView4Transformer2DModel(**{**settings, **config})


def alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **conditioning: torch.Tensor
) -> torch.Tensor:
    output = model(
        hidden_states=latent[:, 0][None],
        encoder_hidden_states=text[None],
        timestep=timestep[None],
        **{name: values[None] for name, values in conditioning.items()},
    ).sample
    return output[0][:, None]


def drawn_sizes(draw: Draw, count: int) -> dict[str, torch.Tensor]:
    return {
        name: 64 + 8 * torch.arange(2.0 * count).view(count, 2) + offset
        for offset, name in enumerate(("original_size", "target_size", "crop_coords"))
    }


CASES = {
    "cogview4": FamilyCase(
        make=make,
        alone=alone,
        sizes=IMAGE_SIZES,
        conditioning=drawn_sizes,
    )
}


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_image(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep / 1000
    _, _, height, width = clean.shape
    inputs = [(1 - sigma) * clean + sigma * noise]
    if "control" in drawn.shown:
        inputs.append(clean_image(pipeline, drawn.shown["control"]))
    shift = (height * width / 4 / pipeline.scheduler.config.base_image_seq_len) ** 0.5 * 0.75 + 0.25
    embeds, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    size = torch.tensor([[8.0 * height, 8.0 * width]])
    output = pipeline.transformer(
        hidden_states=torch.cat(inputs, 1),
        encoder_hidden_states=embeds,
        timestep=1000 * sigma[None] / (shift - (shift - 1) * sigma),  # the pipeline shifts σ, but not the timestep
        original_size=size,
        target_size=size,
        crop_coords=torch.zeros(1, 2),
    ).sample
    return (output - (noise - clean)).square().mean()


RENDER = {"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 64}
RECIPES = {
    "cogview4": RecipeCase(
        tiny="cogview4",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render=RENDER,
    ),
    "cogview4-control": RecipeCase(
        tiny="cogview4-control",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={**RENDER, "control_image": Image.new("RGB", (48, 32), "white")},
        shown=CONTROL,
        needs_shown=True,
    ),
}
