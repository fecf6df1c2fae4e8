"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase, clean_image


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_image(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep / 1000
    embeds, _, pooled, _ = pipeline.encode_prompt(
        drawn.caption, None, None, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    assert embeds.shape == (1, 77 + drawn.max_sequence_length, 32)
    output = pipeline.transformer(
        hidden_states=(1 - sigma) * clean + sigma * noise,
        timestep=drawn.timestep[None],
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
    ).sample
    return (output - (noise - clean)).square().mean()


RENDER = {"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 64}
RECIPES = {
    tiny: RecipeCase(tiny=tiny, loss=text_to_image_loss, sizes=IMAGES, render=RENDER, components=absent)
    for tiny, absent in (("sd3", {}), ("sd3-without-t5", {"text_encoder_3": None, "tokenizer_3": None}))
}
