"""Pipelines of HunyuanVideo 1.5 with small random weights.

Earlier releases of transformers lack classes that diffusers' pipelines import: these are looked up when one is made.
"""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import transformers
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Transformer3DModel,
)
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel, T5EncoderModel

from .components import CHANNELS, TEXT_DIM, latents_of_smooth_clips, numbered, t5_components, template_tokenizer

IMAGE_DIM = 16
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The part of Qwen's chat template that the pipelines use."""


def _text_to_video() -> DiffusionPipeline:
    return diffusers.HunyuanVideo15Pipeline(**_components())


def _image_to_video() -> DiffusionPipeline:
    tokens, patch = 27, 2  # 27 × 27 tokens, as the pipelines expect
    size = tokens * patch
    shape = {"hidden_size": IMAGE_DIM, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return diffusers.HunyuanVideo15ImageToVideoPipeline(
        **_components(),
        image_encoder=SiglipVisionModel(SiglipVisionConfig(image_size=size, patch_size=patch, **shape)).eval(),
        feature_extractor=SiglipImageProcessor(size={"height": size, "width": size}),
    )


def _components() -> dict[str, Any]:
    return {
        **_qwen_components(),
        **numbered(t5_components(T5EncoderModel), 2),
        "vae": _vae(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "guider": ClassifierFreeGuidance(guidance_scale=6.0),
        "transformer": HunyuanVideo15Transformer3DModel(
            in_channels=2 * CHANNELS + 1,
            out_channels=CHANNELS,
            num_attention_heads=4,
            attention_head_dim=16,
            num_layers=2,
            num_refiner_layers=1,
            text_embed_dim=TEXT_DIM,
            text_embed_2_dim=TEXT_DIM,
            image_embed_dim=IMAGE_DIM,
            rope_axes_dim=(4, 6, 6),
        ),
    }


def _qwen_components() -> dict[str, Any]:
    defaults = inspect.signature(diffusers.HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    system, count = (defaults[name].default for name in ("system_message", "crop_start"))
    prefix = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
    tokenizer = template_tokenizer(prefix, count, chat_template=CHAT)
    config = transformers.Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
    )
    return {"tokenizer": tokenizer, "text_encoder": transformers.Qwen2_5_VLTextModel(config).eval()}


def _vae() -> AutoencoderKLHunyuanVideo15:
    vae = AutoencoderKLHunyuanVideo15(latent_channels=CHANNELS, block_out_channels=(8,) * 5, layers_per_block=0).eval()
    vae.enable_slicing()  # its attention mask fits one sample only
    vae.register_to_config(scaling_factor=1 / float(latents_of_smooth_clips(vae).std()))
    return vae


TINY = {"hunyuan-video-1.5": _text_to_video, "hunyuan-video-1.5-image": _image_to_video}
