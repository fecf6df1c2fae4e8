"""SkyReels-V2."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import SkyReelsV2Transformer3DModel

from tests.models import cases, cross_models
from tests.models.families.wan import IMAGE_TO_VIDEO, RENDER, clean_latent, prompt_embeds, text_to_video_loss
from tests.models.recipe_cases import Drawn, RecipeCase


def make(**config: Any) -> SkyReelsV2Transformer3DModel:
    return SkyReelsV2Transformer3DModel(**{**cross_models.WAN, **config})


def alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, *, fps: torch.Tensor | None = None
) -> torch.Tensor:
    rate = {} if fps is None else {"fps": [int(fps)]}
    return model(latent[None], timestep[None], text[None], **rate).sample[0]


def diffusion_forcing_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    """Call the transformer as the pipeline does, frame after frame with noise of its own."""
    clean = clean_latent(pipeline, drawn.pixels)
    noisy = torch.stack(
        [
            (1 - timestep / 1000) * frame + timestep / 1000 * noise
            for timestep, frame, noise in zip(drawn.timestep, clean[0].unbind(1), drawn.noise.unbind(1), strict=True)
        ],
        1,
    )
    output = pipeline.transformer(
        hidden_states=noisy[None],
        timestep=drawn.timestep[None],
        encoder_hidden_states=prompt_embeds(pipeline, drawn),
        enable_diffusion_forcing=True,
        fps=[0 if drawn.fps == 16 else 1],
    ).sample
    return (output - (drawn.noise[None] - clean)).square().mean()


CASES = {
    "skyreels-v2": cases.FamilyCase(make=make, alone=alone),
    "skyreels-v2 fps": cases.FamilyCase(
        make=partial(make, inject_sample_info=True),
        alone=alone,
        conditioning=lambda draw, count: {"fps": torch.arange(count) % 2},
    ),
    "skyreels-v2 image": replace(
        cases.WAN_IMAGE,
        make=partial(make, in_channels=6, image_dim=8, added_kv_proj_dim=24),
        alone=cross_models.wan_image_alone,
    ),
}
RECIPES = {
    "skyreels-v2": RecipeCase(
        tiny="skyreels-v2", loss=text_to_video_loss, render={**RENDER, "max_sequence_length": 64}
    ),
    "skyreels-v2-i2v": replace(IMAGE_TO_VIDEO, tiny="skyreels-v2-i2v"),
    "skyreels-v2-df": RecipeCase(
        tiny="skyreels-v2-df",
        loss=diffusion_forcing_loss,
        render={**RENDER, "max_sequence_length": 64, "ar_step": 1},
    ),
}
