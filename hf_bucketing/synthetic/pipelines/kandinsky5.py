"""A pipeline of Kandinsky 5 with small random weights."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Kandinsky5T2VPipeline,
    Kandinsky5Transformer3DModel,
)
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Modulation
from transformers import CLIPTextModel

from .components import CHANNELS, CLIP_DIM, TEXT_DIM, clip_components, hunyuan_vae, numbered, qwen_components


def kandinsky_transformer(kind: Any, modulation: Any, **config: Any) -> Any:
    """Return a small transformer of Kandinsky 5 or 6, with modulations that are not zero, as they are at first."""
    transformer = kind(
        in_visual_dim=CHANNELS,
        out_visual_dim=CHANNELS,
        in_text_dim=TEXT_DIM,
        in_text_dim2=CLIP_DIM,
        time_dim=32,
        model_dim=64,
        ff_dim=128,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(8, 12, 12),
        **config,
    )
    for module in transformer.modules():
        if isinstance(module, modulation):
            torch.nn.init.normal_(module.out_layer.weight, std=0.1)
    return transformer


def _text_to_video() -> DiffusionPipeline:
    return Kandinsky5T2VPipeline(
        **qwen_components(Kandinsky5T2VPipeline),
        **numbered(clip_components(CLIPTextModel), 2),
        vae=hunyuan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=kandinsky_transformer(Kandinsky5Transformer3DModel, Kandinsky5Modulation, visual_cond=True),
    )


TINY = {"kandinsky5": _text_to_video}
