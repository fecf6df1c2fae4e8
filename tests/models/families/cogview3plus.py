"""CogView3-Plus."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import CogView3PlusTransformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.families.cogview4 import alone, drawn_sizes
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase, clean_image


def make(**config: Any) -> CogView3PlusTransformer2DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "text_embed_dim": 16,
        "time_embed_dim": 24,
        "condition_dim": 8,
        "pos_embed_max_size": 64,
    }
    return CogView3PlusTransformer2DModel(**{**settings, **config})


CASES = {"cogview3plus": FamilyCase(make=make, alone=alone, sizes=IMAGE_SIZES, conditioning=drawn_sizes)}


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, step = clean_image(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep[None]
    _, _, height, width = clean.shape
    embeds, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    size = torch.tensor([[8.0 * height, 8.0 * width]])
    noisy = pipeline.scheduler.add_noise(clean, noise, step)
    output = pipeline.transformer(
        hidden_states=noisy,
        encoder_hidden_states=embeds,
        timestep=step,
        original_size=size,
        target_size=size,
        crop_coords=torch.zeros(1, 2),
    ).sample
    return (output - pipeline.scheduler.get_velocity(clean, noise, step)).square().mean()


RECIPES = {
    "cogview3plus": RecipeCase(
        tiny="cogview3plus",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 64},
    )
}
