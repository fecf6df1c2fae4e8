"""A pipeline of FLUX.3 with small random weights."""

from __future__ import annotations

from typing import Any

from diffusers import Flux3AutoBlocks, Flux3ModularPipeline, Flux3Transformer2DModel
from transformers import CLIPImageProcessorPil, LlavaProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from ...models.families.flux import BLOCK
from .components import CHANNELS, block_vae, message_tokenizer

_WIDTH = 16
"""Channels of the text encoder; the pipeline takes those of eight of its layers."""


def _text_components() -> tuple[Qwen3VLForConditionalGeneration, LlavaProcessor]:
    """Return a Qwen3-VL and a processor of text; that of Qwen3-VL itself needs torchvision."""
    tokenizer = message_tokenizer("message.content")
    chat = tokenizer.chat_template
    processor = LlavaProcessor(CLIPImageProcessorPil(), tokenizer, chat_template=chat, image_token="<|pad|>")
    return small_qwen3_vl(tokenizer, layers=33), processor


def small_qwen3_vl(tokenizer: Any, *, layers: int, **ids: int) -> Qwen3VLForConditionalGeneration:
    """Return a narrow Qwen3-VL of that many layers, with the numbers of the tokens around a picture."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "rope_parameters": rope}
    sizes = {"hidden_size": _WIDTH, "intermediate_size": 32, "num_hidden_layers": layers, "initializer_range": 0.1}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": _WIDTH}
    config = Qwen3VLConfig(
        text_config={"vocab_size": len(tokenizer), **sizes, **heads},
        vision_config={**vision, "deepstack_visual_indexes": [0]},
        **ids,
    )
    return Qwen3VLForConditionalGeneration(config).eval()


def _flux3() -> Flux3ModularPipeline:
    text_encoder, processor = _text_components()
    blocks = Flux3AutoBlocks()
    pipeline = Flux3ModularPipeline(blocks=blocks)
    pipeline.update_components(
        text_encoder=text_encoder,
        tokenizer=processor,
        vae=block_vae(),
        transformer=Flux3Transformer2DModel(
            in_channels=CHANNELS * BLOCK**2,
            cond_in_channels=CHANNELS * BLOCK**2,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=24,
            num_attention_heads=4,
            joint_attention_dim=8 * _WIDTH,
            timestep_channels=32,
            axes_dims_rope=(4, 8, 8, 4),
        ),
    )
    return pipeline


TINY = {"flux3": _flux3}
