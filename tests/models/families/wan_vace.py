"""Wan VACE."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import WanVACETransformer3DModel

from tests.models import cases

CONTROL_CHANNELS, LAYERS = 5, [0, 2]


def make(**config: Any) -> WanVACETransformer3DModel:
    settings = {
        **{"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4},
        **{"out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 48, "num_layers": 3},
        **{"cross_attn_norm": True, "rope_max_seq_len": 64, "vace_layers": LAYERS},
        **{"vace_in_channels": CONTROL_CHANNELS},
    }
    return WanVACETransformer3DModel(**{**settings, **config})


def alone(
    model: Any,
    latent: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    control_hidden_states: torch.Tensor,
    control_hidden_states_scale: torch.Tensor,
) -> torch.Tensor:
    return model(
        latent[None],
        timestep[None],
        text[None],
        control_hidden_states=control_hidden_states[None],
        control_hidden_states_scale=control_hidden_states_scale,
    ).sample[0]


CASES = {
    "wan-vace": cases.FamilyCase(
        make=make,
        alone=alone,
        conditioning=lambda draw, count: {
            "control_hidden_states": [draw(CONTROL_CHANNELS, *size) for size in cases.SIZES],
            "control_hidden_states_scale": 1 + 0.3 * draw(count, len(LAYERS)),
        },
    )
}
