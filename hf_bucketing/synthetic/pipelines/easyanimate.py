"""A pipeline of EasyAnimate 5.1 with small random weights."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLMagvit,
    DiffusionPipeline,
    EasyAnimatePipeline,
    EasyAnimateTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from .components import CHANNELS, TEXT_DIM, latents_of_smooth_clips, template_tokenizer

_BEGIN = "<|im_start|>"
_CHAT = "{% for message in messages %}" + _BEGIN + "{{ message.content[0].text }}{% endfor %}"


def _text_encoder(vocab_size: int) -> Qwen2VLForConditionalGeneration:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.1, "rope_parameters": rope}
    shape = {"hidden_size": TEXT_DIM, "intermediate_size": 64, "num_hidden_layers": 3}
    vision = {"depth": 1, "embed_dim": 16, "mlp_ratio": 1, "num_heads": 2, "hidden_size": TEXT_DIM}
    config = Qwen2VLConfig(text_config={"vocab_size": vocab_size, **shape, **heads}, vision_config=vision)
    return Qwen2VLForConditionalGeneration(config).eval()


def _vae() -> AutoencoderKLMagvit:
    vae = AutoencoderKLMagvit(
        latent_channels=CHANNELS, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4
    ).eval()
    vae.register_to_config(scaling_factor=1 / float(latents_of_smooth_clips(vae).std()))
    return vae


def _text_to_video() -> DiffusionPipeline:
    tokenizer = template_tokenizer(_BEGIN, 1, chat_template=_CHAT)
    return EasyAnimatePipeline(
        tokenizer=tokenizer,
        text_encoder=_text_encoder(len(tokenizer)),
        vae=_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        transformer=EasyAnimateTransformer3DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            patch_size=2,
            num_layers=2,
            mmdit_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            time_embed_dim=32,
            text_embed_dim=TEXT_DIM,
            add_norm_text_encoder=True,
            after_norm=True,
        ),
    )


TINY = {"easyanimate": _text_to_video}
