"""A pipeline of Ovis-Image with small random weights."""

from __future__ import annotations

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
)
from transformers import Qwen3Model

from ...models.families.flux import BLOCK
from .components import CHANNELS, TEXT_DIM, chat_components, empty_pipeline, image_vae


def _text_to_image() -> DiffusionPipeline:
    empty = empty_pipeline(OvisImagePipeline)
    return OvisImagePipeline(
        **chat_components(Qwen3Model, empty.system_prompt, empty.user_prompt_begin_id),
        vae=image_vae(shift_factor=0.1),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        transformer=OvisImageTransformer2DModel(
            in_channels=CHANNELS * BLOCK**2,
            out_channels=CHANNELS * BLOCK**2,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_DIM,
            axes_dims_rope=(4, 6, 6),
        ),
    )


TINY = {"ovis-image": _text_to_image}
