"""Pipelines of Qwen-Image with small random weights."""

from __future__ import annotations

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from hf_bucketing.models.qwen_image.packing import BLOCK

from .components import CHANNELS, TEXT_DIM, qwen_components, qwen_vae


def _text_to_image() -> DiffusionPipeline:
    return QwenImagePipeline(
        **qwen_components(QwenImagePipeline),
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
        ),
    )


TINY = {"qwen-image": _text_to_image}
