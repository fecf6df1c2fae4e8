"""CogVideoX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from tests.models.recipe_cases import CONTROL, FIRST_FRAME, Drawn, RecipeCase, encoding_to_the_mode


@torch.no_grad()
def clean_latent(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode `(3, F, H, W)` to latents with frames first, from which the pipeline's `decode_latents` goes back."""
    latents = pipeline.vae.encode(pixels[None]).latent_dist.mode() * pipeline.vae_scaling_factor_image
    latents = latents.permute(0, 2, 1, 3, 4)
    if pipeline.transformer.config.patch_size_t == 2:
        latents = torch.cat([latents[:, :1], latents], 1)  # the pipeline drops the frame in front
    return latents


def loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    """Compute the loss as diffusers' training script does, from the error of the predicted clean latent."""
    scheduler, transformer = pipeline.scheduler, pipeline.transformer
    clean, noise, step = clean_latent(pipeline, drawn.pixels), drawn.noise.transpose(0, 1)[None], drawn.timestep[None]
    embeds, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    noisy = scheduler.add_noise(clean, noise, step)
    inputs, ofs = noisy, None
    if "control" in drawn.shown:
        control, _ = pipeline.prepare_control_latents(drawn.shown["control"][None])
        inputs = torch.cat([noisy, control.transpose(1, 2)], 2)
    elif transformer.config.in_channels > clean.shape[2]:
        inputs = torch.cat([noisy, image_latents(pipeline, drawn, frames=clean.shape[1])], 2)
        ofs = None if transformer.config.ofs_embed_dim is None else noisy.new_full((1,), 2.0)
    rotary = None
    if transformer.config.use_rotary_positional_embeddings:
        sides = drawn.pixels.shape[2:]
        rotary = pipeline._prepare_rotary_positional_embeddings(*sides, clean.shape[1], torch.device("cpu"))
    output = transformer(inputs, embeds, step, ofs=ofs, image_rotary_emb=rotary).sample
    predicted = scheduler.get_velocity(output, noisy, step)
    weight = 1 / (1 - scheduler.alphas_cumprod[step])
    return (weight * (predicted - clean).square()).mean()


def image_latents(pipeline: Any, drawn: Drawn, *, frames: int) -> torch.Tensor:
    """Let the pipeline prepare the first frame, with the mode of the VAE's posterior instead of a sample of it."""
    height, width = drawn.pixels.shape[2:]
    with encoding_to_the_mode(pipeline.vae):
        _, condition = pipeline.prepare_latents(
            drawn.first[None, :, 0],
            num_channels_latents=len(drawn.noise),
            num_frames=(frames - 1) * pipeline.vae_scale_factor_temporal + 1,
            height=height,
            width=width,
        )
    return condition if drawn.pixels.shape[1] > 1 else torch.zeros_like(condition)  # an image continues nothing


COGVIDEOX = RecipeCase(
    tiny="cogvideox",
    loss=loss,
    render={"num_inference_steps": 2, "guidance_scale": 1.0, "num_frames": 5, "max_sequence_length": 64},
)
PAIRS = replace(COGVIDEOX, tiny="cogvideox-1.5", sizes=((9, 32, 48), (1, 32, 32), (17, 48, 32)), bucket_frames="1,9")

RECIPES = {
    "cogvideox": COGVIDEOX,
    "cogvideox-2b": replace(COGVIDEOX, tiny="cogvideox-2b"),
    "cogvideox-1.5": PAIRS,
    "cogvideox-i2v": replace(PAIRS, tiny="cogvideox-i2v", shown=FIRST_FRAME),
    "cogvideox-fun-control": replace(
        COGVIDEOX,
        tiny="cogvideox-fun-control",
        render={
            "num_inference_steps": 2,
            "guidance_scale": 1.0,
            "max_sequence_length": 64,
            "control_video": [Image.new("RGB", (48, 32), "white")] * 5,
        },
        shown=CONTROL,
        needs_shown=True,
    ),
    "cogvideox-5b-i2v": replace(
        COGVIDEOX,
        tiny="cogvideox-5b-i2v",
        sizes=((5, 32, 48), (1, 32, 48), (9, 32, 48)),
        buckets="32,48",
        one_size=True,
    ),
}
