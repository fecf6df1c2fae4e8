"""A pipeline of Bria 3.2 with small random weights."""

from __future__ import annotations

from diffusers import BriaPipeline, BriaTransformer2DModel, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from transformers import T5EncoderModel

from ...models.families.flux import BLOCK
from .components import CHANNELS, TEXT_DIM, image_vae, t5_components


def _text_to_image() -> DiffusionPipeline:
    return BriaPipeline(
        **t5_components(T5EncoderModel),
        vae=image_vae(shift_factor=0.1),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=BriaTransformer2DModel(
            in_channels=CHANNELS * BLOCK**2,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_DIM,
            pooled_projection_dim=None,
            axes_dims_rope=[4, 6, 6],
        ),
    )


TINY = {"bria": _text_to_image}
