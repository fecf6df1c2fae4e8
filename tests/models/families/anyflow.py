"""AnyFlow."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AnyFlowTransformer3DModel

from tests.models.cases import FamilyCase


def make(**config: Any) -> AnyFlowTransformer3DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 24,
        "ffn_dim": 32,
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "rope_max_seq_len": 64,
    }
    return AnyFlowTransformer3DModel(**{**settings, **config})


def alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, *, r_timestep: torch.Tensor
) -> torch.Tensor:
    frames = latent.shape[1]
    output = model(
        hidden_states=latent.transpose(0, 1)[None],
        timestep=timestep.expand(1, frames),
        r_timestep=r_timestep.expand(1, frames),
        encoder_hidden_states=text[None],
    ).sample
    return output[0].transpose(0, 1)


CASES = {
    "anyflow": FamilyCase(
        make=make, alone=alone, conditioning=lambda draw, count: {"r_timestep": 5 + torch.arange(float(count))}
    )
}
