"""PRX."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import PRXTransformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.recipe_cases import BLOCKS_OF_32, IMAGES, Drawn, RecipeCase, clean_image


def make(**config: Any) -> PRXTransformer2DModel:
    settings = {
        "in_channels": 4,
        "context_in_dim": 16,
        "hidden_size": 32,
        "num_heads": 2,
        "depth": 2,
        "axes_dim": [8, 8],
    }
    return PRXTransformer2DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    padded = torch.cat([text, 7 * torch.ones_like(text[:1]).expand(3, -1)]) if len(text) else text
    output = model(
        hidden_states=latent[:, 0][None],
        timestep=timestep[None] / 1000,
        encoder_hidden_states=padded[None],
        attention_mask=(torch.arange(len(padded)) < len(text))[None],
    ).sample
    return output[0][:, None]


CASES = {
    "prx": FamilyCase(
        make=make, alone=alone, sizes=IMAGE_SIZES, lora_targets=("img_qkv_proj", "txt_kv_proj", "to_out.0")
    )
}
CASES["prx resolution"] = replace(CASES["prx"], make=partial(make, resolution_embeds=True, bottleneck_size=12))


@torch.no_grad()
def clean_by_autoencoder(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode an image `(3, 1, H, W)` to `(1, C, h, w)` by a VAE without a posterior."""
    return pipeline.vae.encode(pixels[None, :, 0]).latent * pipeline.vae.config.scaling_factor


def text_to_image_loss(pipeline: Any, drawn: Drawn, *, encode: Any = clean_image) -> torch.Tensor:
    clean, noise, sigma = encode(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep / 1000
    embeds, mask, *_ = pipeline.encode_prompt(
        drawn.caption, "cpu", do_classifier_free_guidance=False, tokenizer_max_length=drawn.max_sequence_length
    )
    velocity = pipeline.transformer(
        hidden_states=(1 - sigma) * clean + sigma * noise,
        timestep=drawn.timestep[None] / 1000,
        encoder_hidden_states=embeds,
        attention_mask=mask,
    ).sample
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "prx": RecipeCase(
        tiny="prx",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={
            "num_inference_steps": 2,
            "guidance_scale": 1.0,
            "use_resolution_binning": False,
            "tokenizer_max_length": 64,
        },
    )
}
RECIPES["prx-dc"] = replace(
    RECIPES["prx"],
    tiny="prx-dc",
    loss=partial(text_to_image_loss, encode=clean_by_autoencoder),
    sizes=((1, 32, 64), (1, 32, 32), (1, 64, 32)),
    buckets=BLOCKS_OF_32,
)
