"""CogView4."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import CogView4Transformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase


def make(**config: Any) -> CogView4Transformer2DModel:
    settings = {
        **{"in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16},
        **{"num_attention_heads": 2, "text_embed_dim": 16, "time_embed_dim": 24, "condition_dim": 8},
    }
    return CogView4Transformer2DModel(**{**settings, **config})


def alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **conditioning: torch.Tensor
) -> torch.Tensor:
    output = model(
        hidden_states=latent[:, 0][None],
        encoder_hidden_states=text[None],
        timestep=timestep[None],
        **{name: values[None] for name, values in conditioning.items()},
    ).sample
    return output[0][:, None]


CASES = {
    "cogview4": FamilyCase(
        make=make,
        alone=alone,
        sizes=IMAGE_SIZES,
        conditioning=lambda draw, count: {
            name: 64 + 8 * torch.arange(2.0 * count).view(count, 2) + offset
            for offset, name in enumerate(("original_size", "target_size", "crop_coords"))
        },
    )
}
