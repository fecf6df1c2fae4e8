"""A pipeline of Kandinsky 6 with small random weights, without what makes sound."""

from __future__ import annotations

import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Kandinsky6TI2VAPipeline,
    Kandinsky6Transformer3DModel,
)
from diffusers.models.transformers.transformer_kandinsky6 import Kandinsky6Modulation
from diffusers.pipelines.kandinsky6 import pipeline_kandinsky6_ti2va as stock
from transformers import CLIPTextModel

from .components import (
    CHANNELS,
    CLIP_DIM,
    TEXT_DIM,
    clip_components,
    hunyuan_vae,
    numbered,
    qwen_encoder,
    template_tokenizer,
)


def _transformer() -> Kandinsky6Transformer3DModel:
    transformer = Kandinsky6Transformer3DModel(
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
        in_audio_dim=6,
        out_audio_dim=6,
        ca_rope=True,
        cross_gates=True,
        fix_modulation=True,
        visual_token_type_num_embeddings=2,
    )
    for module in transformer.modules():
        if isinstance(module, Kandinsky6Modulation):  # zero at first, so that no block would do anything
            torch.nn.init.normal_(module.out_layer.weight, std=0.1)
    return transformer


def _text_to_video() -> DiffusionPipeline:
    tokenizer = template_tokenizer(stock._PROMPT_TEMPLATE.partition("{}")[0], stock._QWEN_CROP_START)
    return Kandinsky6TI2VAPipeline(
        tokenizer=tokenizer,
        text_encoder=qwen_encoder(len(tokenizer)),
        **numbered(clip_components(CLIPTextModel), 2),
        vae=hunyuan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=_transformer(),
    )


TINY = {"kandinsky6": _text_to_video}
