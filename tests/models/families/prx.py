"""PRX."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import PRXTransformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase


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
