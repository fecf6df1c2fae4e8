"""GLM-Image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import GlmImageTransformer2DModel

from tests.models.cases import IMAGE_SIZES, Draw, FamilyCase


def make(**config: Any) -> GlmImageTransformer2DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "text_embed_dim": 16,
        "time_embed_dim": 24,
        "condition_dim": 8,
        "prior_vq_quantizer_codebook_size": 32,
    }
    return GlmImageTransformer2DModel(**{**settings, **config})


def alone(
    model: Any,
    latent: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    prior_token_id: torch.Tensor,
    prior_token_drop: torch.Tensor,
    **sizes: torch.Tensor,
) -> torch.Tensor:
    tokens = prior_token_id[0, 0, ::2, ::2].flatten()[None]
    output = model(
        hidden_states=latent[:, 0][None],
        encoder_hidden_states=text[None],
        prior_token_id=tokens,
        prior_token_drop=torch.full_like(tokens, bool(prior_token_drop), dtype=torch.bool),
        timestep=timestep[None],
        **{name: values[None] for name, values in sizes.items()},
    ).sample
    return output[0][:, None]


def conditions(draw: Draw, count: int) -> Mapping[str, Any]:
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(32, (1, 1, h // 2, w // 2), generator=generator) for _, h, w in IMAGE_SIZES]
    sizes = 64 + 8 * torch.arange(2.0 * count).view(count, 2)
    return {
        "target_size": sizes,
        "crop_coords": sizes + 1,
        "prior_token_id": [ids.repeat_interleave(2, 2).repeat_interleave(2, 3) for ids in tokens],
        "prior_token_drop": torch.arange(count) % 3 == 1,
    }


CASES = {"glm-image": FamilyCase(make=make, alone=alone, sizes=IMAGE_SIZES, conditioning=conditions)}
