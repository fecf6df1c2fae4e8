"""Motif-Video."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from typing import Any

import diffusers
import torch

from tests.models.cases import FamilyCase


def _in_the_dtype_of_the_weights(embedder: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0].to(embedder.linear_1.weight.dtype),)


class MotifVideoTransformer3DModel(diffusers.MotifVideoTransformer3DModel):
    """The stock model, which runs in float64 only if its embedding of time takes its weights' dtype."""

    @functools.wraps(diffusers.MotifVideoTransformer3DModel.__init__)
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.time_text_embed.timestep_embedder.register_forward_pre_hook(_in_the_dtype_of_the_weights)


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
