"""Qwen-Image 2.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import QwenImage21Pipeline, QwenImage21Transformer2DModel

from hf_bucketing.models.first_frame import pictures
from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.families.wan import clean_latent
from tests.models.recipe_cases import BLOCKS_OF_32, REFERENCE, Drawn, RecipeCase


def make(**config: Any) -> QwenImage21Transformer2DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "context_in_dim": 16,
        "mlp_ratio": 2,
        "axes_dims_rope": (4, 6, 6),
    }
    return QwenImage21Transformer2DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return _velocity(model, [latent[None]], timestep, text[None], None, torch.zeros(1, len(text), dtype=torch.bool))[0]


def _velocity(
    model: Any,
    latents: Sequence[torch.Tensor],
    timestep: torch.Tensor,
    text: torch.Tensor,
    mask: torch.Tensor | None,
    image_pad_mask: torch.Tensor,
) -> torch.Tensor:
    """Call the model as the pipeline does with the latents of references and, as the last one, of the sample."""
    _, channels, _, height, width = latents[-1].shape
    slots = torch.ones(1, height * width // 4, dtype=torch.bool)
    tokens = [QwenImage21Pipeline._pack_latents(latent, 1, channels, *latent.shape[3:]) for latent in latents]
    output = model(
        hidden_states=torch.cat(tokens, 1),
        timestep=timestep[None] / 1000,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, *latent.shape[3:]) for latent in latents]],
        img_mask=torch.cat([image_pad_mask, slots], 1),
    ).sample
    return QwenImage21Pipeline._unpack_latents(output[:, -height * width :], 16 * height, 16 * width, 16)


CASES = {"qwen-image-2.1": FamilyCase(make=make, alone=alone, sizes=IMAGE_SIZES, empty_text=False, shortest_strip=4)}


def loss_by_hand(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    references = drawn.shown.get("reference", ())
    *shown, clean = (
        clean_latent(pipeline, torch.cat([pixels, torch.ones_like(pixels[:1])]))  # opaque
        for pixels in (*references, drawn.pixels)
    )
    noise, sigma = drawn.noise[None], drawn.timestep / 1000
    seen = [picture for pixels in references for picture in pictures(pixels.transpose(0, 1))]
    text = pipeline.encode_prompt(drawn.caption, image=seen or None)
    noisy = (1 - sigma) * clean + sigma * noise
    velocity = _velocity(pipeline.transformer, [*shown, noisy], drawn.timestep, *text)
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "qwen-image-2.1": RecipeCase(
        tiny="qwen-image-2.1",
        loss=loss_by_hand,
        sizes=((1, 32, 64), (1, 64, 64), (1, 64, 32)),
        buckets=BLOCKS_OF_32,
        render={"num_inference_steps": 2},
        shown=REFERENCE,
        references=(((1, 64, 32), (1, 32, 64)), (), ((1, 64, 64), (1, 32, 32), (1, 32, 96))),
        max_sequence_length=96,  # each letter of the template is a token
    )
}
