"""Pipelines of HunyuanVideo, HunyuanVideo 1.5 and HunyuanImage 2.1 with small random weights.

Earlier releases of transformers lack classes that diffusers' pipelines of HunyuanVideo 1.5 import: these are looked up
when one is made.
"""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import transformers
from diffusers import (
    AutoencoderKLHunyuanImage,
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from transformers import (
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5EncoderModel,
)

from .components import (
    CHANNELS,
    CLIP_DIM,
    TEXT_DIM,
    clip_components,
    hunyuan_vae,
    numbered,
    qwen_components,
    t5_components,
    template_tokenizer,
    with_scale,
)

_IMAGE_DIM = 16
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The part of Qwen's chat template that the pipelines of HunyuanVideo 1.5 use."""


def _video() -> DiffusionPipeline:
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


def _video_15() -> DiffusionPipeline:
    return diffusers.HunyuanVideo15Pipeline(**_video_15_components())


def _video_15_of_image() -> DiffusionPipeline:
    tokens, patch = 27, 2  # 27 × 27 tokens, as the pipelines expect
    size = tokens * patch
    shape = {"hidden_size": _IMAGE_DIM, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return diffusers.HunyuanVideo15ImageToVideoPipeline(
        **_video_15_components(),
        image_encoder=SiglipVisionModel(SiglipVisionConfig(image_size=size, patch_size=patch, **shape)).eval(),
        feature_extractor=SiglipImageProcessor(size={"height": size, "width": size}),
    )


def _video_15_components() -> dict[str, Any]:
    return {
        **_chat_components(),
        **numbered(t5_components(T5EncoderModel), 2),
        "vae": _video_15_vae(),
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
            image_embed_dim=_IMAGE_DIM,
            rope_axes_dim=(4, 6, 6),
        ),
    }


def _chat_components() -> dict[str, Any]:
    defaults = inspect.signature(diffusers.HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    system, count = (defaults[name].default for name in ("system_message", "crop_start"))
    prefix = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
    tokenizer = template_tokenizer(prefix, count, chat_template=_CHAT)
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


def _video_15_vae() -> AutoencoderKLHunyuanVideo15:
    vae = AutoencoderKLHunyuanVideo15(latent_channels=CHANNELS, block_out_channels=(8,) * 5, layers_per_block=0).eval()
    vae.enable_slicing()  # its attention mask fits one sample only
    return with_scale(vae)


def _image() -> DiffusionPipeline:
    return HunyuanImagePipeline(
        **qwen_components(HunyuanImagePipeline),
        **numbered(t5_components(T5EncoderModel), 2),
        vae=_image_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=HunyuanImageTransformer2DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            guidance_embeds=True,
            text_embed_dim=TEXT_DIM,
            text_embed_2_dim=TEXT_DIM,
            rope_axes_dim=(8, 8),
        ),
    )


def _image_vae() -> AutoencoderKLHunyuanImage:
    width = 32  # its norms have 32 groups
    vae = AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=CHANNELS,
        block_out_channels=(width,) * 4,
        layers_per_block=1,
        spatial_compression_ratio=8,
        sample_size=64,
        scaling_factor=1.0,
    ).eval()
    return with_scale(vae, images=True)


TINY = {
    "hunyuan-video": _video,
    "hunyuan-video-1.5": _video_15,
    "hunyuan-video-1.5-image": _video_15_of_image,
    "hunyuan-image": _image,
}
