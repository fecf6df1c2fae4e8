"""A pipeline of Z-Image with small random weights."""

from __future__ import annotations

from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3Model

from .components import CHANNELS, TEXT_DIM, image_vae, template_tokenizer

_USER, _REPLY = "<|im_start|>user\n", "<|im_end|>\n"


def _text_to_image() -> DiffusionPipeline:
    chat = "{% for message in messages %}" + _USER + "{{ message['content'] }}" + _REPLY + "{% endfor %}"
    tokenizer = template_tokenizer(_USER, 1, chat_template=chat)
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
    return ZImagePipeline(
        tokenizer=tokenizer,
        text_encoder=Qwen3Model(config).eval(),
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
