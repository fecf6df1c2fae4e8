"""Z-Image."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ZImageTransformer2DModel

from tests.models.cases import FamilyCase
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase, clean_image


def make(**config: Any) -> ZImageTransformer2DModel:
    settings = {
        "in_channels": 4,
        "dim": 48,
        "n_layers": 2,
        "n_refiner_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 16,
        "axes_dims": [8, 8, 8],
        "axes_lens": [128, 32, 32],
    }
    return ZImageTransformer2DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return -model([latent], (1000 - timestep[None]) / 1000, [text]).sample[0]


# One token, 32 tokens and 32 of text, which need no learned ones, 33 of both, and long text beside a small image.
CASES = {
    "z-image": FamilyCase(
        make=make,
        alone=alone,
        sizes=((1, 4, 6), (1, 8, 16), (1, 2, 2), (1, 6, 22), (1, 4, 6), (1, 12, 10)),
        text_lengths=(7, 32, 1, 33, 90, 4),
    )
}


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_image(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep / 1000
    texts, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    noisy = (1 - sigma) * clean + sigma * noise
    output = pipeline.transformer(list(noisy.unsqueeze(2)), (1000 - drawn.timestep[None]) / 1000, texts).sample
    return (-torch.stack(output).squeeze(2) - (noise - clean)).square().mean()


RECIPES = {
    "z-image": RecipeCase(
        tiny="z-image",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={"num_inference_steps": 2, "guidance_scale": 0.0, "max_sequence_length": 64},
    )
}
