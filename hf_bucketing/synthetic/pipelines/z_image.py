"""A pipeline of Z-Image with small random weights."""

from __future__ import annotations

from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Model

from .components import CHANNELS, TEXT_DIM, chat_components, image_vae


def _text_to_image() -> DiffusionPipeline:
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


TINY = {"z-image": _text_to_image}
