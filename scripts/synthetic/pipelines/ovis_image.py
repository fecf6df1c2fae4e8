"""A pipeline of Ovis-Image with small random weights."""

from __future__ import annotations

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
)
from transformers import Qwen3Config, Qwen3Model

from hf_bucketing.models.flux.packing import BLOCK

from .components import CHANNELS, TEXT_DIM, empty_pipeline, image_vae, template_tokenizer

_USER, _REPLY = "<|im_start|>user\n", "<|im_end|>\n"


def _text_to_image() -> DiffusionPipeline:
    empty = empty_pipeline(OvisImagePipeline)
    chat = "{% for message in messages %}" + _USER + "{{ message['content'] }}" + _REPLY + "{% endfor %}"
    tokenizer = template_tokenizer(_USER + empty.system_prompt, empty.user_prompt_begin_id, chat_template=chat)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.1,
    )
    return OvisImagePipeline(
        tokenizer=tokenizer,
        text_encoder=Qwen3Model(config).eval(),
        vae=image_vae(shift_factor=0.1),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        transformer=OvisImageTransformer2DModel(
            in_channels=CHANNELS * BLOCK**2,
            out_channels=CHANNELS * BLOCK**2,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_DIM,
            axes_dims_rope=(4, 6, 6),
        ),
    )


TINY = {"ovis-image": _text_to_image}
