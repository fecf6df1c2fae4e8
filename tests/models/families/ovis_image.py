"""Ovis-Image."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import OvisImagePipeline, OvisImageTransformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase, clean_image


def make(**config: Any) -> OvisImageTransformer2DModel:
    settings = {
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    }
    return OvisImageTransformer2DModel(**{**settings, **config})


def call(model: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Call the model on `(1, C, h, w)` as the pipeline does."""
    _, channels, height, width = latents.shape
    numbers = torch.arange(text.shape[1])
    output = model(
        hidden_states=OvisImagePipeline._pack_latents(latents, 1, channels, height, width),
        timestep=timestep[None] / 1000,
        encoder_hidden_states=text,
        txt_ids=torch.stack([torch.zeros_like(numbers), numbers, numbers], 1).float(),
        img_ids=OvisImagePipeline._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", torch.float32),
    ).sample
    return OvisImagePipeline._unpack_latents(output, 8 * height, 8 * width, 8)


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return call(model, latent.transpose(0, 1), timestep, text[None]).transpose(0, 1)


CASES = {"ovis-image": FamilyCase(make=make, alone=alone, sizes=IMAGE_SIZES)}


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_image(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep / 1000
    embeds, _, _, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    velocity = call(pipeline.transformer, (1 - sigma) * clean + sigma * noise, drawn.timestep, embeds)
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "ovis-image": RecipeCase(
        tiny="ovis-image",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 64},
    )
}
