"""A pipeline of CogView3-Plus with small random weights."""

from __future__ import annotations

from diffusers import CogVideoXDDIMScheduler, CogView3PlusPipeline, CogView3PlusTransformer2DModel, DiffusionPipeline
from transformers import T5EncoderModel

from .components import CHANNELS, TEXT_DIM, image_vae, t5_components


def _text_to_image() -> DiffusionPipeline:
    return CogView3PlusPipeline(
        **t5_components(T5EncoderModel),
        vae=image_vae(),
        scheduler=CogVideoXDDIMScheduler(
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
            clip_sample=False,
            snr_shift_scale=4.0,
        ),
        transformer=CogView3PlusTransformer2DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=TEXT_DIM,
            time_embed_dim=32,
            condition_dim=16,
            pos_embed_max_size=64,
            sample_size=16,
        ),
    )


TINY = {"cogview3plus": _text_to_image}
