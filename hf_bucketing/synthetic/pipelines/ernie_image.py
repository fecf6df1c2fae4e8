"""A pipeline of ERNIE-Image with small random weights."""

from __future__ import annotations

import torch
from diffusers import (
    DiffusionPipeline,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import Mistral3Config, Mistral3Model

from ...models.families.flux import BLOCK
from .components import CHANNELS, TEXT_DIM, block_vae, template_tokenizer

_DECODER = {
    "hidden_size": TEXT_DIM,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.1,
}


def _text_to_image() -> DiffusionPipeline:
    tokenizer = template_tokenizer("<s>", 1)
    text = {"model_type": "mistral", "vocab_size": len(tokenizer), "num_hidden_layers": 3, **_DECODER}
    images = {"model_type": "pixtral", "num_hidden_layers": 1, "image_size": 32, **_DECODER}
    return ErnieImagePipeline(
        tokenizer=tokenizer,
        text_encoder=Mistral3Model(Mistral3Config(text_config=text, vision_config=images)).eval(),
        vae=block_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=4.0),
        transformer=_transformer(),
    )


def _transformer() -> ErnieImageTransformer2DModel:
    """Return a transformer whose modulation and last layer, which begin as zeros, are random too."""
    transformer = ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=64,
        in_channels=CHANNELS * BLOCK**2,
        out_channels=CHANNELS * BLOCK**2,
        text_in_dim=TEXT_DIM,
        rope_axes_dim=(4, 6, 6),
    )
    for layer in (transformer.adaLN_modulation[-1], transformer.final_linear):
        torch.nn.init.normal_(layer.weight, std=0.1)
    return transformer


TINY = {"ernie-image": _text_to_image}
