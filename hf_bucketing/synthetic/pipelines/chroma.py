"""A pipeline of Chroma with small random weights."""

from __future__ import annotations

from diffusers import ChromaPipeline, ChromaTransformer2DModel, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from transformers import T5EncoderModel

from ...models.families.flux import BLOCK
from .components import CHANNELS, TEXT_DIM, image_vae, t5_components


def _text_to_image() -> DiffusionPipeline:
    return ChromaPipeline(
        **t5_components(T5EncoderModel),
        vae=image_vae(shift_factor=0.1),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        transformer=ChromaTransformer2DModel(
            in_channels=CHANNELS * BLOCK**2,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=24,
            num_attention_heads=4,
            joint_attention_dim=TEXT_DIM,
            axes_dims_rope=(4, 10, 10),
            approximator_num_channels=16,
            approximator_hidden_dim=32,
            approximator_layers=2,
        ),
    )


TINY = {"chroma": _text_to_image}
