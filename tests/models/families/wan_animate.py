"""Wan-Animate."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import WanAnimateTransformer3DModel

from tests.models import cases

SIDE = 16
SIZES = ((3, 4, 6), (2, 8, 4), (5, 6, 6), (2, 2, 2), (3, 4, 6), (2, 10, 6))
"""The first latent frame of each is that of its character; some are images."""


def make(**config: Any) -> WanAnimateTransformer3DModel:
    settings = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 12,
        "latent_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 48,
        "num_layers": 4,
        "cross_attn_norm": True,
        "image_dim": 8,
        "added_kv_proj_dim": 24,
        "rope_max_seq_len": 65,
        "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
        "motion_encoder_size": SIDE,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 8,
        "face_encoder_hidden_dim": 8,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 2,
        "motion_encoder_batch_size": 3,
    }
    return WanAnimateTransformer3DModel(**{**settings, **config})


def alone(
    model: Any,
    latent: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    encoder_hidden_states_image: torch.Tensor,
    pose_hidden_states: torch.Tensor,
    face_pixel_values: torch.Tensor,
) -> torch.Tensor:
    return model(
        latent[None],
        timestep[None],
        text[None],
        encoder_hidden_states_image=encoder_hidden_states_image[None],
        pose_hidden_states=pose_hidden_states[None, :, 1:],
        face_pixel_values=face_pixel_values[None],
    ).sample[0]


def conditioning(draw: cases.Draw, count: int) -> dict[str, Any]:
    return {
        "encoder_hidden_states_image": draw(count, 6, 8),
        "pose_hidden_states": [draw(4, *size) for size in SIZES],
        "face_pixel_values": [draw(3, 4 * (frames - 2) + 1, SIDE, SIDE) for frames, _, _ in SIZES],
    }


CASES = {
    "wan-animate": cases.FamilyCase(
        make=make,
        alone=alone,
        sizes=SIZES,
        text_lengths=(512,) * len(SIZES),
        channels=12,
        conditioning=conditioning,
    )
}
