"""Pipelines of Flux with small random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxControlPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import CLIPTextModel, T5EncoderModel

from ...models.families.flux import BLOCK
from .components import CHANNELS, CLIP_DIM, TEXT_DIM, clip_components, image_vae, numbered, t5_components


def _pipeline(kind: type[DiffusionPipeline], **config: Any) -> DiffusionPipeline:
    return kind(
        **clip_components(CLIPTextModel),
        **numbered(t5_components(T5EncoderModel), 2),
        vae=image_vae(shift_factor=0.1),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        transformer=FluxTransformer2DModel(**{**_TRANSFORMER, **config}),
    )


_TRANSFORMER = {
    "in_channels": CHANNELS * BLOCK**2,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "joint_attention_dim": TEXT_DIM,
    "pooled_projection_dim": CLIP_DIM,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 10, 10),
}
TINY = {
    "flux": partial(_pipeline, FluxPipeline),
    "flux-control": partial(
        _pipeline,
        FluxControlPipeline,
        in_channels=2 * CHANNELS * BLOCK**2,
        out_channels=CHANNELS * BLOCK**2,
    ),
    "flux-kontext": partial(_pipeline, FluxKontextPipeline),
}
