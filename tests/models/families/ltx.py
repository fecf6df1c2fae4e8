"""LTX-Video."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.models.recipe_cases import BLOCKS_OF_32, FIRST_FRAME, Drawn, RecipeCase

Predict = Callable[[Any, Drawn, torch.Tensor, torch.Tensor], torch.Tensor]


@torch.no_grad()
def clean_latent(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode `(3, F, H, W)` as the image-to-video pipeline encodes its image, without drawing."""
    vae = pipeline.vae
    latent = vae.encode(pixels[None]).latent_dist.mode()
    return pipeline._normalize_latents(latent, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)


def tokens(pipeline: Any, latent: torch.Tensor) -> torch.Tensor:
    return pipeline._pack_latents(
        latent, pipeline.transformer_spatial_patch_size, pipeline.transformer_temporal_patch_size
    )


def predict(pipeline: Any, drawn: Drawn, noisy: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    embeds, mask, _, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    spatial = pipeline.vae_spatial_compression_ratio
    return pipeline.transformer(
        hidden_states=tokens(pipeline, noisy),
        encoder_hidden_states=embeds,
        timestep=timestep,
        encoder_attention_mask=mask,
        **dict(zip(("num_frames", "height", "width"), noisy.shape[2:], strict=True)),
        rope_interpolation_scale=(pipeline.vae_temporal_compression_ratio / drawn.fps, spatial, spatial),
        return_dict=False,
    )[0]


def predict_causally(pipeline: Any, drawn: Drawn, noisy: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """Call the transformer as `LTXConditionPipeline` does without conditions."""
    embeds, mask, _, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    grid = pipeline._prepare_video_ids(1, *noisy.shape[2:])
    coordinates = pipeline._scale_video_ids(
        grid,
        scale_factor=pipeline.vae_spatial_compression_ratio,
        scale_factor_t=pipeline.vae_temporal_compression_ratio,
    ).float()
    coordinates[:, 0] = coordinates[:, 0] * (1.0 / drawn.fps)
    return pipeline.transformer(
        hidden_states=tokens(pipeline, noisy),
        encoder_hidden_states=embeds,
        timestep=timestep[:, None],
        encoder_attention_mask=mask,
        video_coords=coordinates,
        return_dict=False,
    )[0]


def text_to_video_loss(pipeline: Any, drawn: Drawn, *, predict: Predict = predict) -> torch.Tensor:
    clean, noise, sigma = clean_latent(pipeline, drawn.pixels), drawn.noise[None], drawn.timestep / 1000
    output = predict(pipeline, drawn, (1 - sigma) * clean + sigma * noise, drawn.timestep[None])
    return (output - tokens(pipeline, noise - clean)).square().mean()


def image_to_video_loss(pipeline: Any, drawn: Drawn, *, predict: Predict = predict) -> torch.Tensor:
    """The first frame is encoded by itself, as the pipeline's image is."""
    if drawn.pixels.shape[1] == 1:
        return text_to_video_loss(pipeline, drawn, predict=predict)
    clean, noise, sigma = clean_latent(pipeline, drawn.pixels), drawn.noise[None], drawn.timestep / 1000
    noisy = (1 - sigma) * clean + sigma * noise
    mask = torch.zeros_like(noisy[:, :1])
    mask[:, :, 0] = 1
    noisy = clean_latent(pipeline, drawn.first) * mask + noisy * (1 - mask)
    timestep = drawn.timestep[None, None] * (1 - tokens(pipeline, mask).squeeze(-1))
    output = predict(pipeline, drawn, noisy, timestep)
    output = pipeline._unpack_latents(output, *noisy.shape[2:])
    return (output - (noise - clean))[:, :, 1:].square().mean()


STRIDES = {"buckets": BLOCKS_OF_32, "bucket_frames": "1,9"}
RENDER = {"num_inference_steps": 2, "guidance_scale": 1.0, "num_frames": 5, "max_sequence_length": 64}
RECIPES = {
    "ltx": RecipeCase(tiny="ltx", loss=text_to_video_loss, render=RENDER, **STRIDES),
    "ltx-i2v": RecipeCase(tiny="ltx-i2v", loss=image_to_video_loss, render=RENDER, **STRIDES, shown=FIRST_FRAME),
    "ltx-condition": RecipeCase(
        tiny="ltx-condition",
        loss=partial(text_to_video_loss, predict=predict_causally),
        render=RENDER,
        **STRIDES,
    ),
}
