"""Z-Image."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ZImageTransformer2DModel

from tests.models.cases import FamilyCase


def make(**config: Any) -> ZImageTransformer2DModel:
    settings = {
        **{"in_channels": 4, "dim": 48, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 2, "n_kv_heads": 2},
        **{"cap_feat_dim": 16, "axes_dims": [8, 8, 8], "axes_lens": [128, 32, 32]},
    }
    return ZImageTransformer2DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return -model([latent], (1000 - timestep[None]) / 1000, [text]).sample[0]


# One token, 32 tokens and 32 of text, which need no learned ones, 33 of both, and long text beside a small image.
CASES = {
    "z-image": FamilyCase(
        make=make,
        alone=alone,
        sizes=((1, 4, 6), (1, 8, 16), (1, 2, 2), (1, 6, 22), (1, 4, 6), (1, 12, 10)),
        text_lengths=(7, 32, 1, 33, 90, 4),
    )
}
