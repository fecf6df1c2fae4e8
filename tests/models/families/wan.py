"""Wan."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.recipe_cases import Drawn, RecipeCase


@torch.no_grad()
def clean_latent(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode `(3, F, H, W)` so that the pipeline's way of decoding gives it back."""
    vae = pipeline.vae
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    return (vae.encode(pixels[None]).latent_dist.mode() - mean) * std


def text_to_video_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_latent(pipeline, drawn.pixels), drawn.noise[None], drawn.timestep / 1000
    embeds, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    noisy = (1 - sigma) * clean + sigma * noise
    output = pipeline.transformer(noisy, timestep=drawn.timestep[None], encoder_hidden_states=embeds).sample
    return (output - (noise - clean)).square().mean()


RECIPES = {
    "wan": RecipeCase(
        tiny="wan",
        loss=text_to_video_loss,
        render={"num_inference_steps": 2, "guidance_scale": 1.0, "num_frames": 5, "max_sequence_length": 64},
    )
}
