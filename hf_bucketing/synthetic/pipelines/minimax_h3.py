"""A pipeline of MiniMax-H3 with small random weights."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3ModularPipeline,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)

from .components import BEGIN, CHANNELS, VISION_TOKENS, picture_processor, template_tokenizer, with_statistics
from .flux3 import small_qwen3_vl

_LAYER = 50
"""Layer of the text encoder that the pipeline reads, of one more."""


def _minimax_h3() -> MiniMaxH3ModularPipeline:
    tokenizer = template_tokenizer(BEGIN, 1, special_tokens=VISION_TOKENS)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in VISION_TOKENS.items()}
    text_encoder = small_qwen3_vl(tokenizer, layers=_LAYER + 1, **ids)
    pipeline = MiniMaxH3ModularPipeline()
    sound = {"latents_mean": [0.0] * CHANNELS, "latents_std": [1.0] * CHANNELS}
    pipeline.update_components(
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        processor=picture_processor(tokenizer, side=32),
        vae=_vae(),
        audio_vae=AutoencoderKLMiniMaxH3Audio(
            encoder_dim=4,
            latent_dim=8,
            latent_channels=CHANNELS,
            num_attention_heads=2,
            decoder_dim=128,
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1,),),
            **sound,
        ).eval(),
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
        transformer=_transformer(text_encoder.config.text_config.hidden_size),
        transformer_ref=_transformer(text_encoder.config.text_config.hidden_size),
        reference_image_short_edge=64,
    )
    return pipeline


def _transformer(text_dim: int) -> MiniMaxH3Transformer3DModel:
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=24,
        num_layers=2,
        ffn_dim=32,
        in_channels=CHANNELS,
        audio_in_channels=CHANNELS,
        text_dim=text_dim,
        freq_dim=16,
        time_embed_hidden_dim=24,
        time_embed_dim=20,
        rope_freq_dim=2,
    )


def _vae() -> AutoencoderKLMiniMaxH3:
    """Return a VAE with the strides of the published one, whose latents have mean 0 and deviation 1."""
    vae = AutoencoderKLMiniMaxH3(
        latent_channels=CHANNELS,
        block_out_channels=(2, 4, 4, 4),  # convolutions over time are slow on CPUs
        layers_per_block=1,
        spatial_downsample_factors=(2, 2, 2, 2),
        temporal_downsample_factors=(1, 2, 2, 1),
        norm_num_groups=2,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
    ).eval()
    return with_statistics(vae)


TINY = {"minimax-h3": _minimax_h3}
