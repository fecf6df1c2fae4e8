"""Pipelines of LTX-Video with small random weights."""

from __future__ import annotations

from functools import partial

from diffusers import (
    AutoencoderKLLTXVideo,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    LTXConditionPipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from transformers import T5EncoderModel

from .components import CHANNELS, TEXT_DIM, latents_of_smooth_clips, t5_components


def _pipeline(pipeline_class: type[DiffusionPipeline], *, shifts_by_size: bool = True) -> DiffusionPipeline:
    return pipeline_class(
        **t5_components(T5EncoderModel),
        vae=_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=shifts_by_size,
            base_image_seq_len=64,
            max_image_seq_len=1024,
            base_shift=0.95,
            max_shift=2.05,
        ),
        transformer=LTXVideoTransformer3DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_attention_heads=4,
            attention_head_dim=24,
            cross_attention_dim=96,
            num_layers=2,
            caption_channels=TEXT_DIM,
        ),
    )


def _vae() -> AutoencoderKLLTXVideo:
    blocks, layers = (8,) * 4, (1,) * 5
    vae = AutoencoderKLLTXVideo(
        latent_channels=CHANNELS,
        block_out_channels=blocks,
        decoder_block_out_channels=blocks,
        layers_per_block=layers,
        decoder_layers_per_block=layers,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=2,
    ).eval()
    latents = latents_of_smooth_clips(vae)
    vae.latents_mean.copy_(latents.mean(1))
    vae.latents_std.copy_(latents.std(1))
    return vae


TINY = {
    "ltx": partial(_pipeline, LTXPipeline),
    "ltx-i2v": partial(_pipeline, LTXImageToVideoPipeline),
    "ltx-condition": partial(_pipeline, LTXConditionPipeline, shifts_by_size=False),
}
