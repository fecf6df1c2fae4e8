"""A pipeline of Motif-Video with small random weights."""

from __future__ import annotations

from diffusers import (
    ClassifierFreeGuidance,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    MotifVideoPipeline,
    MotifVideoTransformer3DModel,
)
from transformers import ByT5Tokenizer, T5Gemma2Encoder

from .components import CHANNELS, TEXT_DIM, wan_vae


def _text_encoder(vocab_size: int) -> T5Gemma2Encoder:
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2}
    text = {"hidden_size": TEXT_DIM, "intermediate_size": 64, "head_dim": 16, "num_key_value_heads": 1, **heads}
    vision = {"hidden_size": 16, "intermediate_size": 16, "image_size": 32, "patch_size": 16, **heads}
    config = T5Gemma2Encoder.config_class(
        text_config={"vocab_size": vocab_size, "dropout_rate": 0.0, **text},
        vision_config={"model_type": "siglip_vision_model", **vision},
        mm_tokens_per_image=4,
    )
    return T5Gemma2Encoder(config).eval()


def _text_to_video() -> DiffusionPipeline:
    tokenizer = ByT5Tokenizer()
    return MotifVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=_text_encoder(len(tokenizer)),
        vae=wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_image_seq_len=4, max_image_seq_len=64, base_shift=0.5, max_shift=1.15
        ),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
        transformer=MotifVideoTransformer3DModel(
            in_channels=2 * CHANNELS + 1,
            out_channels=CHANNELS,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_single_layers=4,
            num_decoder_layers=2,
            mlp_ratio=2.0,
            text_embed_dim=TEXT_DIM,
            rope_axes_dim=(4, 6, 6),
            enable_text_cross_attention_dual=True,
            enable_text_cross_attention_single=True,
        ),
    )


TINY = {"motif-video": _text_to_video}
