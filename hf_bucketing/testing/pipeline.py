"""A Wan pipeline with small random weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

from ..errors import BucketingError

_CHANNELS = 4
_TEXT_DIM = 32


def make_tiny_pipeline(folder: str | os.PathLike[str], *, seed: int = 0) -> None:
    """Save a `WanPipeline` of the parts of Wan 2.1, each a few thousand weights.

    Its tokenizer works on bytes and needs no vocabulary file. The VAE's latents have mean 0 and deviation 1, as those
    of the trained one have. The folder appears under its name only when it is complete, and replaces an earlier one.

    Args:
        folder (path): Where to write.
        seed (`int`): Of the weights.

    Raises:
        BucketingError: If the folder exists and is no pipeline.
    """
    target = Path(folder)
    if target.exists() and any(target.iterdir()) and not (target / "model_index.json").exists():
        raise BucketingError(f"{target} exists and is no diffusers pipeline; choose another folder.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = ByT5Tokenizer()
        pipeline = WanPipeline(
            tokenizer=tokenizer,
            text_encoder=_text_encoder(len(tokenizer)),
            vae=_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            transformer=_transformer(),
        )
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    pipeline.save_pretrained(str(partial))
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)


def _transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
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
    )


def _text_encoder(vocab_size: int) -> UMT5EncoderModel:
    config = UMT5Config(
        vocab_size=vocab_size, d_model=_TEXT_DIM, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return UMT5EncoderModel(config).eval()


def _vae() -> AutoencoderKLWan:
    """Return a VAE whose latents of smooth random clips have mean 0 and deviation 1 by its configuration."""
    settings = {"base_dim": 8, "z_dim": _CHANNELS, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    ones = {"latents_mean": [0.0] * _CHANNELS, "latents_std": [1.0] * _CHANNELS}
    vae = AutoencoderKLWan(**settings, **ones).eval()
    coarse = torch.rand(8, 3, 3, 6, 6) * 2 - 1
    with torch.no_grad():
        clips = torch.nn.functional.interpolate(coarse, size=(5, 64, 64), mode="trilinear")
        latents = vae.encode(clips).latent_dist.mode().transpose(0, 1).flatten(1)
    vae.register_to_config(latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist())
    return vae
