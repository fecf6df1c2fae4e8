"""HunyuanVideo 1.5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import HunyuanVideo15Transformer3DModel

from tests.models.cases import FamilyCase


def make_model(**config: Any) -> HunyuanVideo15Transformer3DModel:
    settings = {
        **{"in_channels": 7, "out_channels": 3, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2},
        **{"num_refiner_layers": 2, "text_embed_dim": 16, "text_embed_2_dim": 12, "image_embed_dim": 10},
        **{"rope_axes_dim": (4, 6, 6)},
    }
    return HunyuanVideo15Transformer3DModel(**{**settings, **config})


def alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **conditioning: torch.Tensor
) -> torch.Tensor:
    """Run a sample with padded text and its mask, as the pipeline does."""
    rest = {name: values[None] for name, values in conditioning.items()}
    mask = (torch.arange(9) < len(text)).to(text.dtype)
    padded = F.pad(text, (0, 0, 0, 9 - len(text)), value=3.0)
    return model(latent[None], timestep[None].to(latent.dtype), padded[None], mask[None], **rest).sample[0]


def conditioning(draw: Callable[..., torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Draw glyphs of 0, 2, 4 … tokens, and an image for every other sample."""
    glyphs = torch.tensor([(sample * 2) % 5 for sample in range(count)])
    image = draw(count, 6, 10) * (torch.arange(count) % 2).view(-1, 1, 1)
    return {
        "encoder_hidden_states_2": draw(count, 5, 12),
        "encoder_attention_mask_2": (torch.arange(5) < glyphs[:, None]).to(image.dtype),
        "image_embeds": image,
    }


MIXED = FamilyCase(
    make=make_model,
    alone=alone,
    sizes=((3, 2, 3), (1, 4, 2), (5, 3, 3), (1, 1, 1), (3, 2, 3), (1, 5, 3)),
    channels=7,
    out_channels=3,
    empty_text=False,
    conditioning=conditioning,
    # the last block's text goes nowhere
    without_gradient=("1.attn.to_add_out", "1.attn.add_q_proj", "1.attn.norm_added_q", "1.ff_context"),
)

CASES = {"hunyuan-1.5": MIXED}
