"""LTX-Video."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import LTXConditionPipeline

from tests.models.recipe_cases import BLOCKS_OF_32, FIRST_FRAME, REFERENCE, Drawn, RecipeCase

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


def coordinates(pipeline: Any, grid: Sequence[int], fps: float) -> torch.Tensor:
    """Return where a pipeline places the tokens of a latent of that size, `(1, 3, tokens)`."""
    temporal, spatial = pipeline.vae_temporal_compression_ratio, pipeline.vae_spatial_compression_ratio
    if isinstance(pipeline, LTXConditionPipeline):
        ids = pipeline._prepare_video_ids(1, *grid)
        pixels = pipeline._scale_video_ids(ids, scale_factor=spatial, scale_factor_t=temporal).float()
        return torch.cat([pixels[:, :1] * (1.0 / fps), pixels[:, 1:]], 1)
    axes = [torch.arange(count, dtype=torch.float32) for count in grid]
    scales = (temporal / fps, float(spatial), float(spatial))
    return (torch.cartesian_prod(*axes) * torch.tensor(scales)).T[None]


def with_references(
    pipeline: Any, call: dict[str, Any], references: Sequence[torch.Tensor], *, grid: Sequence[int], fps: float
) -> dict[str, Any]:
    """Add references `(3, F, h, w)` to the arguments of the transformer's call for a sample of that latent grid.

    LTX-Video's own trainer does so: they are clean, have timestep 0, and lie over the sample, so that coordinates
    are multiplied where they are smaller. No pipeline of diffusers takes them.
    """
    own, located = call["hidden_states"], [coordinates(pipeline, grid, fps)]
    latents = [clean_latent(pipeline, pixels) for pixels in references]
    for latent in latents:
        frames, sides = coordinates(pipeline, latent.shape[2:], fps).split([1, 2], 1)
        located.append(torch.cat([frames, sides * (grid[1] // latent.shape[3])], 1))
    shown = [tokens(pipeline, latent) for latent in latents]
    levels = F.pad(call["timestep"].flatten()[:1].expand(own.shape[1]), (0, sum(part.shape[1] for part in shown)))
    return {
        **call,
        "hidden_states": torch.cat([own, *shown], 1),
        "timestep": levels[None],
        "rope_interpolation_scale": None,
        "video_coords": torch.cat(located, 2),
    }


def predict(pipeline: Any, drawn: Drawn, noisy: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """Call the transformer as the pipeline does, `LTXConditionPipeline` without conditions."""
    embeds, mask, _, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    grid, spatial = noisy.shape[2:], pipeline.vae_spatial_compression_ratio
    own = tokens(pipeline, noisy)
    call = {
        "hidden_states": own,
        "encoder_hidden_states": embeds,
        "timestep": timestep,
        "encoder_attention_mask": mask,
    }
    if isinstance(pipeline, LTXConditionPipeline):
        call |= {"timestep": timestep[:, None], "video_coords": coordinates(pipeline, grid, drawn.fps)}
    else:
        scales = pipeline.vae_temporal_compression_ratio / drawn.fps, spatial, spatial
        call |= {**dict(zip(("num_frames", "height", "width"), grid, strict=True)), "rope_interpolation_scale": scales}
    if references := drawn.shown.get("reference", ()):
        call = with_references(pipeline, call, references, grid=grid, fps=drawn.fps)
    return pipeline.transformer(**call, return_dict=False)[0][:, : own.shape[1]]


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
IN_CONTEXT = (((5, 16, 24), (1, 16, 24)), (), ((9, 48, 32), (9, 16, 8), (1, 24, 16)))
"""Sizes of references that lie over the samples, some of them smaller."""
RECIPES = {
    **{
        tiny: RecipeCase(
            tiny=tiny,
            loss=text_to_video_loss,
            render=RENDER,
            **STRIDES,
            shown=REFERENCE,
            references=IN_CONTEXT,
        )
        for tiny in ("ltx", "ltx-condition")
    },
    "ltx-i2v": RecipeCase(tiny="ltx-i2v", loss=image_to_video_loss, render=RENDER, **STRIDES, shown=FIRST_FRAME),
}
