"""Latte."""

from __future__ import annotations

from typing import Any

import torch

from hf_bucketing.losses import GaussianPosterior, batch_vlb
from tests.models.recipe_cases import Drawn, RecipeCase


@torch.no_grad()
def text_to_video_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    vae, scheduler = pipeline.vae, pipeline.scheduler
    frames = vae.encode(drawn.pixels.transpose(0, 1)).latent_dist.mode() * vae.config.scaling_factor
    clean, noise, timestep = frames.transpose(0, 1)[None], drawn.noise[None], drawn.timestep[None]
    embeds, _ = pipeline.encode_prompt(drawn.caption, do_classifier_free_guidance=False, negative_prompt=None)
    noisy = scheduler.add_noise(clean, noise, timestep)
    table = pipeline.transformer.temp_pos_embed
    pipeline.transformer.temp_pos_embed = table[:, : clean.shape[2]]  # the stock model runs its own duration only
    output = pipeline.transformer(noisy, timestep=timestep, encoder_hidden_states=embeds).sample
    pipeline.transformer.temp_pos_embed = table
    bound = batch_vlb(
        output, noised=noisy, clean=clean, timesteps=timestep, posterior=GaussianPosterior.from_scheduler(scheduler)
    )
    return (output[:, :4] - noise).square().mean() + bound[0]


RECIPES = {
    "latte": RecipeCase(
        tiny="latte",
        loss=text_to_video_loss,
        sizes=((16, 32, 48), (1, 32, 32), (9, 48, 32)),
        render={"num_inference_steps": 2, "guidance_scale": 1.0, "video_length": 16},
        max_sequence_length=120,
        bucket_frames="1,16",
        target_fps=8,
    )
}
