"""A pipeline of Flux with small random weights."""

from __future__ import annotations

from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel, T5EncoderModel

from ..tiny import CHANNELS, CLIP_DIM, TEXT_DIM, clip_components, image_vae, numbered, t5_components
from .packing import BLOCK


def _text_to_image() -> DiffusionPipeline:
    return FluxPipeline(
        **clip_components(CLIPTextModel),
        **numbered(t5_components(T5EncoderModel), 2),
        vae=image_vae(shift_factor=0.1),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        transformer=FluxTransformer2DModel(
            in_channels=CHANNELS * BLOCK**2,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=24,
            num_attention_heads=4,
            joint_attention_dim=TEXT_DIM,
            pooled_projection_dim=CLIP_DIM,
            guidance_embeds=True,
            axes_dims_rope=(4, 10, 10),
        ),
    )


TINY = {"flux": _text_to_image}
