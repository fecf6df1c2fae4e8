"""Wan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from tests.models.recipe_cases import BLOCKS_OF_32, FIRST_FRAME, Drawn, RecipeCase


@torch.no_grad()
def clean_latent(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode `(3, F, H, W)` so that the pipeline's way of decoding gives it back."""
    vae = pipeline.vae
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    return (vae.encode(pixels[None]).latent_dist.mode() - mean) * std


def prompt_embeds(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    embeds, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    return embeds


def noisy_latent(drawn: Drawn, clean: torch.Tensor) -> torch.Tensor:
    sigma = drawn.timestep / 1000
    return (1 - sigma) * clean + sigma * drawn.noise[None]


def masked_mean(error: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of errors `(1, C, f, h, w)`, weighted by a mask `(1, F, H, W)` of the pixels."""
    if mask is None:
        return error.mean()
    frames = [mask[0, :1], *mask[0, 1:].split(4)][: error.shape[2]]
    weights = torch.stack([group.mean(0) for group in frames])
    weights = torch.nn.functional.avg_pool2d(weights, 8).expand_as(error)
    return (error * weights).sum() / weights.sum()


def text_to_video_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean = clean_latent(pipeline, drawn.pixels)
    timestep = drawn.timestep[None]
    if pipeline.config.get("expand_timesteps"):  # as the pipeline's call does, the same for all tokens
        _, frames, height, width = clean[0].shape
        timestep = timestep.expand(1, frames * (height // 2) * (width // 2))
    output = pipeline.transformer(
        noisy_latent(drawn, clean), timestep=timestep, encoder_hidden_states=prompt_embeds(pipeline, drawn)
    ).sample
    return (output - (drawn.noise[None] - clean)).square().mean()


def picture(frame: torch.Tensor) -> Image.Image:
    """Return a frame `(3, H, W)` in [−1, 1] as a person would pass it to a pipeline."""
    return Image.fromarray(((frame + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())


def image_to_video_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    """Take the condition of the pipeline's own `prepare_latents` for the first (and last) frame."""
    pixels, clean = drawn.pixels, clean_latent(pipeline, drawn.pixels)
    config = pipeline.transformer.config
    last = None if config.pos_embed_seq_len is None else drawn.last[None, :, 0]
    _, frames, height, width = pixels.shape
    options = {"num_channels_latents": 4, "height": height, "width": width, "num_frames": frames}
    noisy = noisy_latent(drawn, clean)
    images = {} if last is None else {"last_image": last}
    options |= {"dtype": torch.float32, "device": torch.device("cpu"), "latents": noisy.clone()}
    made = pipeline.prepare_latents(drawn.first[None, :, 0], 1, **options, **images)
    embeds = prompt_embeds(pipeline, drawn)
    if pipeline.config.get("expand_timesteps"):
        _, condition, mask = made
        if frames == 1:  # text-to-image
            mask = torch.ones_like(mask)
        latents = (1 - mask) * condition + mask * noisy
        timestep = (mask[0][0][:, ::2, ::2] * drawn.timestep).flatten()[None]
        output = pipeline.transformer(latents, timestep=timestep, encoder_hidden_states=embeds).sample
        error = (output - (drawn.noise[None] - clean)).square()
        return error.mean() if frames == 1 else error[:, :, 1:].mean()
    images = None
    if config.image_dim is not None:
        shown = [picture(drawn.first[:, 0])] if last is None else [picture(drawn.first[:, 0]), picture(last[0])]
        images = pipeline.encode_image(shown)
    output = pipeline.transformer(
        torch.cat([noisy, made[1]], 1),
        timestep=drawn.timestep[None],
        encoder_hidden_states=embeds,
        encoder_hidden_states_image=images,
    ).sample
    return (output - (drawn.noise[None] - clean)).square().mean()


RENDER = {"num_inference_steps": 2, "guidance_scale": 1.0, "num_frames": 5}
VIDEOS = ((5, 32, 48), (9, 48, 32), (5, 32, 32))
LARGE = {"sizes": ((5, 64, 96), (1, 64, 64), (9, 96, 64)), "buckets": BLOCKS_OF_32, "max_tokens": 32}
"""Sizes for the VAE of Wan 2.2, whose latents are 16 pixels wide."""

IMAGE_TO_VIDEO = RecipeCase(
    tiny="wan-i2v",
    loss=image_to_video_loss,
    sizes=VIDEOS,
    render=RENDER,
    max_sequence_length=512,
    max_tokens=64,
    images=False,
    shown=FIRST_FRAME,
)
RECIPES = {
    "wan": RecipeCase(tiny="wan", loss=text_to_video_loss, render={**RENDER, "max_sequence_length": 64}),
    "wan-2.2-t2v-5b": RecipeCase(
        tiny="wan-2.2-t2v-5b", loss=text_to_video_loss, **LARGE, render={**RENDER, "max_sequence_length": 64}
    ),
    "wan-i2v": IMAGE_TO_VIDEO,
    "wan-flf2v": replace(IMAGE_TO_VIDEO, tiny="wan-flf2v", shown=(("first_frame", "last_frame"),)),
    "wan-2.2-i2v": replace(
        IMAGE_TO_VIDEO, tiny="wan-2.2-i2v", render={**RENDER, "max_sequence_length": 64}, max_sequence_length=64
    ),
    "wan-2.2-ti2v": RecipeCase(
        tiny="wan-2.2-ti2v",
        loss=image_to_video_loss,
        **LARGE,
        render={**RENDER, "max_sequence_length": 64},
        shown=FIRST_FRAME,
    ),
}
