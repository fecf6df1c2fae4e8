"""A pipeline of Qwen-Image 2.1 with small random weights."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLQwenImage21,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from transformers import Qwen3VLForConditionalGeneration

from .components import (
    CHANNELS,
    TEXT_DIM,
    VISION_TOKENS,
    picture_processor,
    qwen3_vl,
    template_tokenizer,
    with_statistics,
)

_SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'][0]['text'] }}<|im_end|>\n{% endfor %}"
)


def _text_to_image() -> DiffusionPipeline:
    tokenizer = template_tokenizer(_SYSTEM, 1, special_tokens=VISION_TOKENS)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in VISION_TOKENS.items()}
    return QwenImage21Pipeline(
        processor=picture_processor(tokenizer, side=32, chat_template=_CHAT),
        text_encoder=qwen3_vl(len(tokenizer), kind=Qwen3VLForConditionalGeneration, **ids),
        vae=_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_image_seq_len=4, max_image_seq_len=64, base_shift=0.5, max_shift=0.9
        ),
        transformer=QwenImage21Transformer2DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=TEXT_DIM,
            mlp_ratio=2,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def _vae() -> AutoencoderKLQwenImage21:
    settings = {"base_dim": 8, "decoder_base_dim": 8, "z_dim": CHANNELS, "dim_mult": [1] * 5, "num_res_blocks": 1}
    return with_statistics(AutoencoderKLQwenImage21(**settings).eval(), frames=1, channels=4)


TINY = {"qwen-image-2.1": _text_to_image}
