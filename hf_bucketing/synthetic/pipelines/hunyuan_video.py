"""Pipelines of HunyuanVideo with small random weights."""

from __future__ import annotations

from typing import Any

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from transformers import CLIPTextModel, LlamaConfig, LlamaModel

from .components import CHANNELS, CLIP_DIM, TEXT_DIM, clip_components, hunyuan_vae, numbered, template_tokenizer


def _text_to_video() -> DiffusionPipeline:
    return HunyuanVideoPipeline(
        **_llama_components(),
        **numbered(clip_components(CLIPTextModel), 2),
        vae=hunyuan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        transformer=HunyuanVideoTransformer3DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_attention_heads=4,
            attention_head_dim=16,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=TEXT_DIM,
            pooled_projection_dim=CLIP_DIM,
            rope_axes_dim=(4, 6, 6),
        ),
    )


def _llama_components() -> dict[str, Any]:
    prefix, _, _ = DEFAULT_PROMPT_TEMPLATE["template"].partition("{}")
    tokenizer = template_tokenizer(prefix, DEFAULT_PROMPT_TEMPLATE["crop_start"])
    shape = {"hidden_size": TEXT_DIM, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    vocabulary = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "initializer_range": 0.1}
    config = LlamaConfig(**vocabulary, **shape)
    return {"tokenizer": tokenizer, "text_encoder": LlamaModel(config).eval()}


TINY = {"hunyuan-video": _text_to_video}
