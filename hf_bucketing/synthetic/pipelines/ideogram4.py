"""A pipeline of Ideogram 4 with small random weights."""

from __future__ import annotations

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Ideogram4Pipeline,
    Ideogram4Transformer2DModel,
)
from transformers import Qwen3VLModel

from ...models.families.flux import BLOCK
from .components import CHANNELS, TEXT_DIM, block_vae, message_tokenizer, qwen3_vl

_LAYERS, _TAKEN = 36, 13
"""Layers of the text encoder, and how many of them the pipeline takes."""


def _text_to_image() -> DiffusionPipeline:
    tokenizer = message_tokenizer("message.content[0].text")
    return Ideogram4Pipeline(
        tokenizer=tokenizer,
        text_encoder=qwen3_vl(len(tokenizer), kind=Qwen3VLModel, layers=_LAYERS),
        vae=block_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=_transformer(),
        unconditional_transformer=_transformer(),
    )


def _transformer() -> Ideogram4Transformer2DModel:
    return Ideogram4Transformer2DModel(
        in_channels=CHANNELS * BLOCK**2,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        intermediate_size=64,
        adaln_dim=16,
        llm_features_dim=_TAKEN * TEXT_DIM,
        mrope_section=(4, 2, 2),
    )


TINY = {"ideogram4": _text_to_image}
