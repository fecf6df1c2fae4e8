"""Pipelines of CogVideoX and EasyAnimate 5.1 with small random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLMagvit,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXFunControlPipeline,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    DiffusionPipeline,
    EasyAnimatePipeline,
    EasyAnimateTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, T5EncoderModel

from .components import CHANNELS, TEXT_DIM, message_tokenizer, t5_components, with_scale

TEXT_LENGTH = 64
"""Text tokens per caption, instead of 226."""

_SCHEDULE = {
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
    "clip_sample": False,
}
_VAE = {"block_out_channels": (8,) * 4, "latent_channels": CHANNELS, "norm_num_groups": 4}
_ROTARY = {"use_rotary_positional_embeddings": True}
_PAIRS = {**_ROTARY, "patch_size_t": 2, "patch_bias": False}


def _text_to_video(scheduler: type[Any], snr_shift_scale: float, **config: Any) -> DiffusionPipeline:
    return CogVideoXPipeline(**_components(scheduler, snr_shift_scale, **config))


def _image_to_video(*, invert_scale_latents: bool = False, **config: Any) -> DiffusionPipeline:
    components = _components(CogVideoXDPMScheduler, 1.0, in_channels=2 * CHANNELS, **config)
    components["vae"].register_to_config(invert_scale_latents=invert_scale_latents)
    return CogVideoXImageToVideoPipeline(**components)


def _control(**config: Any) -> DiffusionPipeline:
    return CogVideoXFunControlPipeline(**_components(CogVideoXDDIMScheduler, 1.0, in_channels=2 * CHANNELS, **config))


def _components(scheduler: type[Any], snr_shift_scale: float, **config: Any) -> dict[str, Any]:
    latents = {"in_channels": CHANNELS, "out_channels": CHANNELS}
    blocks = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "time_embed_dim": 32}
    text = {"text_embed_dim": TEXT_DIM, "max_text_seq_length": TEXT_LENGTH}
    sample = {"sample_width": 64, "sample_height": 64, "sample_frames": 9}
    return {
        **t5_components(T5EncoderModel),
        "vae": with_scale(AutoencoderKLCogVideoX(layers_per_block=0, **_VAE).eval()),
        "scheduler": scheduler(snr_shift_scale=snr_shift_scale, **_SCHEDULE),
        "transformer": CogVideoXTransformer3DModel(**(latents | blocks | text | sample | config)),
    }


def _easyanimate() -> DiffusionPipeline:
    tokenizer = message_tokenizer("message.content[0].text")
    return EasyAnimatePipeline(
        tokenizer=tokenizer,
        text_encoder=_qwen2_vl(len(tokenizer)),
        vae=with_scale(AutoencoderKLMagvit(layers_per_block=1, **_VAE).eval()),
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


def _qwen2_vl(vocab_size: int) -> Qwen2VLForConditionalGeneration:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.1, "rope_parameters": rope}
    shape = {"hidden_size": TEXT_DIM, "intermediate_size": 64, "num_hidden_layers": 3}
    vision = {"depth": 1, "embed_dim": 16, "mlp_ratio": 1, "num_heads": 2, "hidden_size": TEXT_DIM}
    config = Qwen2VLConfig(text_config={"vocab_size": vocab_size, **shape, **heads}, vision_config=vision)
    return Qwen2VLForConditionalGeneration(config).eval()


TINY: dict[str, Callable[[], DiffusionPipeline]] = {
    "cogvideox": partial(_text_to_video, CogVideoXDPMScheduler, 1.0, **_ROTARY),
    "cogvideox-2b": partial(_text_to_video, CogVideoXDDIMScheduler, 3.0),
    "cogvideox-1.5": partial(_text_to_video, CogVideoXDPMScheduler, 1.0, **_PAIRS),
    "cogvideox-i2v": partial(_image_to_video, ofs_embed_dim=32, invert_scale_latents=True, **_PAIRS),
    "cogvideox-fun-control": partial(_control, **_ROTARY),
    "cogvideox-5b-i2v": partial(
        _image_to_video, use_learned_positional_embeddings=True, sample_height=4, sample_width=6, **_ROTARY
    ),
    "easyanimate": _easyanimate,
}
