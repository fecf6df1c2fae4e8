"""HunyuanVideo."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.recipe_cases import Drawn, RecipeCase


@torch.no_grad()
def text_to_video_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    vae, sigma, noise = pipeline.vae, drawn.timestep / 1000, drawn.noise[None]
    clean = vae.encode(drawn.pixels[None]).latent_dist.mode() * vae.config.scaling_factor
    embeds, pooled, mask = pipeline.encode_prompt(drawn.caption, max_sequence_length=drawn.max_sequence_length)
    output = pipeline.transformer(
        hidden_states=(1 - sigma) * clean + sigma * noise,
        timestep=drawn.timestep[None],
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask.to(embeds.dtype),
        pooled_projections=pooled,
        guidance=torch.tensor([drawn.guidance]) * 1000.0,
    ).sample
    return (output - (noise - clean)).square().mean()


RECIPES = {
    "hunyuan-video": RecipeCase(
        tiny="hunyuan-video",
        loss=text_to_video_loss,
        render={"num_inference_steps": 2, "num_frames": 5, "max_sequence_length": 64},
    )
}
