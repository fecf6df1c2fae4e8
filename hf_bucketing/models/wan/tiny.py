"""Pipelines of Wan with small random weights."""

from __future__ import annotations

from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import UMT5EncoderModel

from ..tiny import CHANNELS, TEXT_DIM, t5_components, wan_vae


def _text_to_video() -> DiffusionPipeline:
    return WanPipeline(
        **t5_components(UMT5EncoderModel),
        vae=wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=24,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=TEXT_DIM,
            freq_dim=64,
            ffn_dim=256,
            num_layers=4,
            cross_attn_norm=True,
            rope_max_seq_len=128,
        ),
    )


TINY = {"wan": _text_to_video}
