"""Text-to-video pipelines with small random weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    DDPMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    LattePipeline,
    LatteTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import ByT5Tokenizer, T5EncoderModel, UMT5EncoderModel

from ..errors import BucketingError
from ..files import complete_folder

_CHANNELS = 4
_TEXT_DIM = 32


def make_tiny_pipeline(folder: str | os.PathLike[str], *, family: str = "wan", seed: int = 0) -> None:
    """Save a pipeline with the components of Wan 2.1, LTX-Video or Latte, of a few thousand weights each.

    Its tokenizer works on bytes and needs no vocabulary file. The VAE's latents have mean 0 and deviation 1, as those
    of the trained VAE. The folder appears under its name only when it is complete, and replaces an earlier one.

    Args:
        folder (path): Folder to write.
        family (`"wan"`, `"ltx"` or `"latte"`): Model family of the pipeline.
        seed (`int`): Seed of the weights.

    Raises:
        BucketingError: If the folder exists and is not a pipeline, or the family is unknown.
    """
    if family not in _MAKERS:
        raise BucketingError(f"There is no tiny {family!r} pipeline; choose one of {', '.join(_MAKERS)}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _MAKERS[family]()
    with complete_folder(folder, marker="model_index.json") as partial:
        pipeline.save_pretrained(str(partial))


def _wan() -> DiffusionPipeline:
    return WanPipeline(
        **_text_components(UMT5EncoderModel),
        vae=_wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=24,
            in_channels=_CHANNELS,
            out_channels=_CHANNELS,
            text_dim=_TEXT_DIM,
            freq_dim=64,
            ffn_dim=256,
            num_layers=4,
            cross_attn_norm=True,
            rope_max_seq_len=128,
        ),
    )


def _ltx() -> DiffusionPipeline:
    return LTXPipeline(
        **_text_components(T5EncoderModel),
        vae=_ltx_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_image_seq_len=64, max_image_seq_len=1024, base_shift=0.95, max_shift=2.05
        ),
        transformer=LTXVideoTransformer3DModel(
            in_channels=_CHANNELS,
            out_channels=_CHANNELS,
            num_attention_heads=4,
            attention_head_dim=24,
            cross_attention_dim=96,
            num_layers=2,
            caption_channels=_TEXT_DIM,
        ),
    )


def _latte() -> DiffusionPipeline:
    return LattePipeline(
        **_text_components(T5EncoderModel),
        vae=_image_vae(),
        scheduler=DDPMScheduler(beta_schedule="linear", variance_type="learned_range", clip_sample=False),
        transformer=LatteTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=24,
            in_channels=_CHANNELS,
            out_channels=2 * _CHANNELS,
            num_layers=2,
            cross_attention_dim=96,
            attention_bias=True,
            sample_size=8,
            patch_size=2,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            caption_channels=_TEXT_DIM,
            video_length=16,
        ),
    )


def _text_components(encoder: type[T5EncoderModel | UMT5EncoderModel]) -> dict[str, Any]:
    tokenizer = ByT5Tokenizer()
    shape = {"d_model": _TEXT_DIM, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = encoder.config_class(vocab_size=len(tokenizer), **shape)
    return {"tokenizer": tokenizer, "text_encoder": encoder(config).eval()}


def _wan_vae() -> AutoencoderKLWan:
    settings = {"base_dim": 8, "z_dim": _CHANNELS, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    ones = {"latents_mean": [0.0] * _CHANNELS, "latents_std": [1.0] * _CHANNELS}
    vae = AutoencoderKLWan(**settings, **ones).eval()
    latents = _latents(vae, _smooth_clips())
    vae.register_to_config(latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist())
    return vae


def _ltx_vae() -> AutoencoderKLLTXVideo:
    blocks, layers = (8,) * 4, (1,) * 5
    vae = AutoencoderKLLTXVideo(
        latent_channels=_CHANNELS,
        block_out_channels=blocks,
        decoder_block_out_channels=blocks,
        layers_per_block=layers,
        decoder_layers_per_block=layers,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=2,
    ).eval()
    latents = _latents(vae, _smooth_clips())
    vae.latents_mean.copy_(latents.mean(1))
    vae.latents_std.copy_(latents.std(1))
    return vae


def _image_vae() -> AutoencoderKL:
    vae = AutoencoderKL(
        block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=_CHANNELS,
        norm_num_groups=4,
    ).eval()
    vae.register_to_config(scaling_factor=1 / float(_latents(vae, _smooth_clips()[:, :, 0]).std()))
    return vae


@torch.no_grad()
def _latents(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    latents: torch.Tensor = vae.encode(pixels).latent_dist.mode().transpose(0, 1).flatten(1)
    return latents


def _smooth_clips() -> torch.Tensor:
    coarse = torch.rand(8, 3, 3, 6, 6) * 2 - 1
    return torch.nn.functional.interpolate(coarse, size=(5, 64, 64), mode="trilinear")


_MAKERS: dict[str, Callable[[], DiffusionPipeline]] = {"wan": _wan, "ltx": _ltx, "latte": _latte}
