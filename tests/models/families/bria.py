"""Bria 3.2."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import BriaPipeline, BriaTransformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase, clean_image


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


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_image(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep / 1000
    _, channels, height, width = clean.shape
    embeds, _, text_ids = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    output = pipeline.transformer(
        hidden_states=pipeline._pack_latents((1 - sigma) * clean + sigma * noise, 1, channels, height, width),
        encoder_hidden_states=embeds,
        timestep=drawn.timestep[None],
        txt_ids=text_ids[0],
        img_ids=pipeline._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", torch.float32),
    ).sample
    velocity = pipeline._unpack_latents(output, 8 * height, 8 * width, pipeline.vae_scale_factor)
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "bria": RecipeCase(
        tiny="bria",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 64},
        components={"image_encoder": None, "feature_extractor": None},
    )
}
