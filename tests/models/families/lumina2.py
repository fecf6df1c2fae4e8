"""Lumina 2."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Lumina2Transformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase, clean_image


def make(**config: Any) -> Lumina2Transformer2DModel:
    settings = {
        "sample_size": 16,
        "in_channels": 4,
        "hidden_size": 48,
        "num_layers": 2,
        "num_refiner_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "multiple_of": 16,
        "cap_feat_dim": 16,
        "axes_dim_rope": (4, 4, 4),
        "axes_lens": (40, 32, 32),
    }
    return Lumina2Transformer2DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Pad the text, as the pipeline does, which attention and positions must not see."""
    padded = torch.cat([text, torch.ones_like(text[:5])])[None]
    mask = (torch.arange(padded.shape[1]) < len(text)).long()[None]
    output = model(latent[None, :, 0], 1 - timestep[None] / 1000, padded, mask).sample
    return -output.transpose(0, 1)


CASES = {
    "lumina2": FamilyCase(
        make=make, alone=alone, sizes=IMAGE_SIZES, text_lengths=(7, 3, 35, 1, 7, 4), empty_text=False
    )
}


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_image(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep / 1000
    embeds, mask, _, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    output = pipeline.transformer(
        hidden_states=(1 - sigma) * clean + sigma * noise,
        timestep=1 - drawn.timestep[None] / 1000,
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask,
    ).sample
    return (-output - (noise - clean)).square().mean()


RECIPES = {
    "lumina2": RecipeCase(
        tiny="lumina2",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 64},
    )
}
