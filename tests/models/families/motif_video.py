"""Motif-Video."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from typing import Any

import diffusers
import torch

from tests.models.cases import FamilyCase, embed_time_in_the_dtype_of_the_weights
from tests.models.families.wan import clean_latent
from tests.models.recipe_cases import Drawn, RecipeCase


class MotifVideoTransformer3DModel(diffusers.MotifVideoTransformer3DModel):
    """The stock model, which also runs in float64."""

    @functools.wraps(diffusers.MotifVideoTransformer3DModel.__init__)
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        embed_time_in_the_dtype_of_the_weights(self)


def make(**config: Any) -> MotifVideoTransformer3DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "mlp_ratio": 2.0,
        "text_embed_dim": 16,
        "rope_axes_dim": (4, 6, 6),
    }
    return MotifVideoTransformer3DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    padded = torch.cat([text, 7 * torch.ones(3, text.shape[1]).to(text)])
    output = model(
        hidden_states=latent[None],
        timestep=timestep[None],
        encoder_hidden_states=padded[None],
        encoder_attention_mask=(torch.arange(len(padded)) < len(text)).long()[None],
    ).sample
    return output[0]


CASES = {"motif-video": FamilyCase(make=make, alone=alone)}
CASES["motif-video decoder"] = replace(
    CASES["motif-video"],
    make=partial(
        make,
        num_single_layers=4,
        num_decoder_layers=2,
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    ),
    empty_text=False,
)


def text_to_video_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_latent(pipeline, drawn.pixels), drawn.noise[None], drawn.timestep / 1000
    noisy = (1 - sigma) * clean + sigma * noise
    embeds, _, mask, _ = pipeline.encode_prompt(drawn.caption, max_sequence_length=drawn.max_sequence_length)
    velocity = pipeline.transformer(
        hidden_states=torch.cat([noisy, torch.zeros_like(noisy), torch.zeros_like(noisy[:, :1])], 1),
        timestep=drawn.timestep[None],
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask,
    ).sample
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "motif-video": RecipeCase(
        tiny="motif-video",
        loss=text_to_video_loss,
        render={"num_inference_steps": 2, "num_frames": 5, "max_sequence_length": 64},
    )
}
