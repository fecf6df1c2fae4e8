"""AuraFlow."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AuraFlowTransformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase, clean_image


def make(**config: Any) -> AuraFlowTransformer2DModel:
    settings = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "num_mmdit_layers": 2,
        "num_single_dit_layers": 4,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "caption_projection_dim": 32,
        "pos_embed_max_size": 64**2,
    }
    return AuraFlowTransformer2DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    output = model(latent[:, 0][None], encoder_hidden_states=text[None], timestep=timestep[None] / 1000).sample
    return output[0][:, None]


CASES = {"auraflow": FamilyCase(make=make, alone=alone, sizes=IMAGE_SIZES)}


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_image(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep / 1000
    embeds, *_ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    output = pipeline.transformer(
        (1 - sigma) * clean + sigma * noise, encoder_hidden_states=embeds, timestep=sigma[None]
    ).sample
    return (output - (noise - clean)).square().mean()


RECIPES = {
    "auraflow": RecipeCase(
        tiny="auraflow",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 64},
    )
}
