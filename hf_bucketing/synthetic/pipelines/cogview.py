"""Pipelines of CogView3-Plus and CogView4 with small random weights."""

from __future__ import annotations

from functools import partial

from diffusers import (
    CogVideoXDDIMScheduler,
    CogView3PlusPipeline,
    CogView3PlusTransformer2DModel,
    CogView4ControlPipeline,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import ByT5Tokenizer, GlmConfig, GlmModel, T5EncoderModel

from .components import CHANNELS, TEXT_DIM, image_vae, t5_components

_TRANSFORMER = {
    "out_channels": CHANNELS,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "text_embed_dim": TEXT_DIM,
    "time_embed_dim": 32,
    "condition_dim": 16,
}


def _cogview3plus() -> DiffusionPipeline:
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
            in_channels=CHANNELS, pos_embed_max_size=64, sample_size=16, **_TRANSFORMER
        ),
    )


def _cogview4(kind: type[DiffusionPipeline], *, in_channels: int = CHANNELS) -> DiffusionPipeline:
    tokenizer = ByT5Tokenizer(padding_side="left")
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": None}
    shape = {"hidden_size": TEXT_DIM, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = GlmConfig(**tokens, **shape, **heads, initializer_range=0.1)
    return kind(
        tokenizer=tokenizer,
        text_encoder=GlmModel(config).eval(),
        vae=image_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, time_shift_type="linear", base_image_seq_len=4, base_shift=0.25, max_shift=0.75
        ),
        transformer=CogView4Transformer2DModel(in_channels=in_channels, **_TRANSFORMER),
    )


TINY = {
    "cogview3plus": _cogview3plus,
    "cogview4": partial(_cogview4, CogView4Pipeline),
    "cogview4-control": partial(_cogview4, CogView4ControlPipeline, in_channels=2 * CHANNELS),
}
