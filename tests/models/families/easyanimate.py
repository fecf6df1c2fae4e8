"""EasyAnimate 5.1."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import EasyAnimateTransformer3DModel

from tests.models.cases import FamilyCase


def make(**config: Any) -> EasyAnimateTransformer3DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "patch_size": 2,
        "num_layers": 2,
        "mmdit_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "time_embed_dim": 24,
        "text_embed_dim": 16,
        "add_norm_text_encoder": True,
        "after_norm": True,
    }
    return EasyAnimateTransformer3DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return model(latent[None], timestep[None], encoder_hidden_states=text[None]).sample[0]


# the last block's text goes nowhere
LAST = ("1.attn1.add_q_proj", "1.attn1.norm_added_q", "1.attn1.to_add_out", "1.txt_ff")
CASES = {"easyanimate": FamilyCase(make=make, alone=alone, without_gradient=LAST)}
