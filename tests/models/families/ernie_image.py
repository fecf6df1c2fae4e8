"""ERNIE-Image."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ErnieImagePipeline, ErnieImageTransformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase


def make(**config: Any) -> ErnieImageTransformer2DModel:
    settings = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "in_channels": 4,
        "out_channels": 4,
        "text_in_dim": 16,
        "rope_axes_dim": (4, 6, 6),
    }
    return ErnieImageTransformer2DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Pad the text as the pipeline does beside a longer one, which must make no difference."""
    texts, lengths = ErnieImagePipeline._pad_text([text, text.new_zeros(len(text) + 3, 16)], "cpu", text.dtype, 16)
    output = model(latent[None, :, 0], timestep[None], texts[:1], lengths[:1]).sample
    return output.transpose(0, 1)


CASES = {"ernie-image": FamilyCase(make=make, alone=alone, sizes=IMAGE_SIZES, empty_text=False)}


@torch.no_grad()
def clean_blocks(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode an image to blocks `(1, 4·C, h, w)`, so that the pipeline's way of decoding them gives it back."""
    statistics = pipeline.vae.bn
    blocks = ErnieImagePipeline._patchify_latents(pipeline.vae.encode(pixels[None, :, 0]).latent_dist.mode())
    mean, variance = (values.view(1, -1, 1, 1) for values in (statistics.running_mean, statistics.running_var))
    return (blocks - mean) / torch.sqrt(variance + 1e-5)


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_blocks(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep / 1000
    (text,) = pipeline.encode_prompt(drawn.caption, "cpu")
    noisy = (1 - sigma) * clean + sigma * noise
    velocity = pipeline.transformer(noisy, drawn.timestep[None], text[None], torch.tensor([len(text)])).sample
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "ernie-image": RecipeCase(
        tiny="ernie-image",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={"num_inference_steps": 2, "guidance_scale": 1.0},
    )
}
