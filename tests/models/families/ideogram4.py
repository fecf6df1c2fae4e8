"""Ideogram 4."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Ideogram4Pipeline, Ideogram4Transformer2DModel

from tests.models.cases import SIZES, FamilyCase

PADDING = 3


def make(**config: Any) -> Ideogram4Transformer2DModel:
    settings = {
        "in_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 12,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "adaln_dim": 8,
        "llm_features_dim": 16,
        "mrope_section": (2, 2, 2),
    }
    return Ideogram4Transformer2DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Put padding in front of the text, as the pipeline does, and take the negated velocity of the image."""
    channels, _, height, width = latent.shape
    start = PADDING + len(text)
    positions, segments, indicator = Ideogram4Pipeline._prepare_ids([len(text)], height, width, start, "cpu")
    tokens = latent.flatten(1).T[None]
    output = model(
        hidden_states=torch.cat([tokens.new_zeros(1, start, channels), tokens], 1),
        timestep=(1 - timestep[None] / 1000).to(latent.dtype),
        encoder_hidden_states=torch.cat(
            [text.new_zeros(PADDING, text.shape[1]), text, text.new_zeros(height * width, text.shape[1])]
        )[None],
        position_ids=positions,
        segment_ids=segments,
        indicator=indicator,
    ).sample
    return -output[0, start:].T.reshape(latent.shape)


CASES = {
    "ideogram4": FamilyCase(make=make, alone=alone, sizes=tuple((1, height, width) for _, height, width in SIZES))
}
