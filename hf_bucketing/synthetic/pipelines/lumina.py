"""Pipelines of Lumina 2 and Z-Image with small random weights."""

from __future__ import annotations

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import Gemma2Model, Qwen3Model

from .components import (
    CHANNELS,
    TEXT_DIM,
    causal_encoder,
    chat_components,
    empty_pipeline,
    image_vae,
    template_tokenizer,
)


def _lumina2() -> DiffusionPipeline:
    empty = empty_pipeline(Lumina2Pipeline)
    tokenizer = template_tokenizer(empty.system_prompt, 1)
    return Lumina2Pipeline(
        tokenizer=tokenizer,
        text_encoder=causal_encoder(Gemma2Model, tokenizer),
        vae=image_vae(shift_factor=0.1),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        transformer=Lumina2Transformer2DModel(
            sample_size=16,
            in_channels=CHANNELS,
            hidden_size=96,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=4,
            num_kv_heads=2,
            multiple_of=16,
            cap_feat_dim=TEXT_DIM,
            axes_dim_rope=(8, 8, 8),
            axes_lens=(300, 128, 128),
        ),
    )


def _z_image() -> DiffusionPipeline:
    return ZImagePipeline(
        **chat_components(Qwen3Model, "", 1),
        vae=image_vae(shift_factor=0.1),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=ZImageTransformer2DModel(
            in_channels=CHANNELS,
            dim=96,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=4,
            n_kv_heads=4,
            cap_feat_dim=TEXT_DIM,
            axes_dims=[8, 8, 8],
            axes_lens=[1024, 128, 128],
        ),
    )


TINY = {"lumina2": _lumina2, "z-image": _z_image}
