"""Pipelines of Flux.2 with small random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinKVPipeline,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ...models.families.flux import BLOCK
from .components import BEGIN, CHANNELS, block_vae, message_tokenizer, template_tokenizer

_WIDTH = 16
"""Channels of the text encoder; the pipelines take those of three of its layers."""
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
_DECODER = {"hidden_size": _WIDTH, "intermediate_size": 32, **_HEADS}


def _pipeline(pipeline: type[DiffusionPipeline], *, guidance: bool, **components: Any) -> DiffusionPipeline:
    return pipeline(
        **components,
        vae=block_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        transformer=Flux2Transformer2DModel(
            in_channels=CHANNELS * BLOCK**2,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=24,
            num_attention_heads=4,
            joint_attention_dim=3 * _WIDTH,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 8, 8, 4),
            guidance_embeds=guidance,
        ),
    )


def _klein(pipeline: type[DiffusionPipeline] = Flux2KleinPipeline) -> DiffusionPipeline:
    tokenizer = message_tokenizer("message.content")
    encoder = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), num_hidden_layers=27, **_DECODER))
    return _pipeline(pipeline, guidance=False, tokenizer=tokenizer, text_encoder=encoder.eval())


def _dev() -> DiffusionPipeline:
    # Each letter of the system message would be a token, so the template leaves it away. A processor for images, which
    # the published pipeline has in the tokenizer's place, needs torchvision.
    template = (
        "{% for message in messages %}{% if message.role == 'user' %}"
        + BEGIN
        + "{{ message.content[0].text }}{% endif %}{% endfor %}"
    )
    tokenizer = template_tokenizer(BEGIN, 1, chat_template=template)
    text = {"model_type": "mistral", "vocab_size": len(tokenizer), "num_hidden_layers": 30, **_DECODER}
    images = {"model_type": "pixtral", "num_hidden_layers": 1, "image_size": 32, **_DECODER}
    encoder = Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=images))
    return _pipeline(Flux2Pipeline, guidance=True, tokenizer=tokenizer, text_encoder=encoder.eval())


TINY = {"flux2": _dev, "flux2-klein": _klein, "flux2-klein-kv": partial(_klein, Flux2KleinKVPipeline)}
