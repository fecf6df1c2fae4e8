"""Pipelines of Qwen-Image with small random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from ...models.families.qwen_image import BLOCK
from .components import CHANNELS, TEXT_DIM, qwen_components, qwen_vae


def _pipeline(pipeline: type[DiffusionPipeline], **config: Any) -> DiffusionPipeline:
    return pipeline(
        **qwen_components(pipeline),
        vae=qwen_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_image_seq_len=4, max_image_seq_len=64, base_shift=0.5, max_shift=0.9
        ),
        transformer=QwenImageTransformer2DModel(
            in_channels=CHANNELS * BLOCK**2,
            out_channels=CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_DIM,
            axes_dims_rope=(4, 6, 6),
            **config,
        ),
    )


TINY = {
    "qwen-image": partial(_pipeline, QwenImagePipeline),
    "qwen-image-edit": partial(_pipeline, QwenImageEditPipeline),
    "qwen-image-edit-2509": partial(_pipeline, QwenImageEditPlusPipeline),
    "qwen-image-edit-2511": partial(_pipeline, QwenImageEditPlusPipeline, zero_cond_t=True),
}
