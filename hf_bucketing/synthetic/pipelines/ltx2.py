"""Pipelines of LTX-2 with small random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    LTX2ImageToVideoPipeline,
    LTX2InContextPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import ByT5Tokenizer, Gemma3Config, Gemma3ForConditionalGeneration

from .components import CHANNELS, TEXT_DIM, latents_of_smooth_clips

_WIDTH, _AUDIO_WIDTH, _LAYERS = 48, 24, 2


def _ltx2(pipeline_class: type[DiffusionPipeline]) -> DiffusionPipeline:
    """Return a pipeline like LTX-2.0: the transformer projects its text."""
    connectors = {"caption_channels": TEXT_DIM, **_connectors(TEXT_DIM, TEXT_DIM)}
    return _pipeline(pipeline_class, connectors, transformer={"caption_channels": TEXT_DIM})


def _ltx23(pipeline_class: type[DiffusionPipeline]) -> DiffusionPipeline:
    """Return a pipeline like LTX-2.3: connectors project the text, the noise level modulates it, heads have gates."""
    gates = {"video_gated_attn": True, "audio_gated_attn": True}
    gated = {"gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True, "audio_cross_attn_mod": True}
    widths = {"per_modality_projections": True, "video_hidden_dim": _WIDTH, "audio_hidden_dim": _AUDIO_WIDTH}
    return _pipeline(
        pipeline_class,
        {"caption_channels": TEXT_DIM, **_connectors(_WIDTH, _AUDIO_WIDTH), **gates, **widths, "proj_bias": True},
        transformer={**gated, "use_prompt_embeddings": False, "perturbed_attn": True},
    )


def _pipeline(
    pipeline_class: type[DiffusionPipeline], connectors: dict[str, Any], *, transformer: dict[str, Any]
) -> DiffusionPipeline:
    tokenizer = ByT5Tokenizer()
    latents = {"in_channels": CHANNELS, "out_channels": CHANNELS, "vae_scale_factors": (4, 8, 8)}
    blocks = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "cross_attention_dim": _WIDTH}
    audio = {"audio_in_channels": 4, "audio_out_channels": 4, "audio_cross_attention_dim": _AUDIO_WIDTH}
    audio_heads = {"audio_num_attention_heads": 4, "audio_attention_head_dim": 6}
    upsampling = {"upsample_kernel_sizes": [32, 20], "upsample_factors": [16, 10]}
    residuals = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]]}
    return pipeline_class(
        tokenizer=tokenizer,
        text_encoder=_gemma(vocab_size=len(tokenizer)),
        connectors=LTX2TextConnectors(**connectors).eval(),
        vae=_vae(),
        audio_vae=AutoencoderKLLTX2Audio(
            base_channels=4, ch_mult=(1, 1, 1), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8
        ).eval(),
        vocoder=LTX2Vocoder(
            in_channels=16, hidden_channels=32, output_sampling_rate=16000, **upsampling, **residuals
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_image_seq_len=64, max_image_seq_len=1024, base_shift=0.95, max_shift=2.05
        ),
        transformer=LTX2VideoTransformer3DModel(
            rope_type="split", **latents, **blocks, **audio, **audio_heads, **transformer
        ),
    )


def _connectors(video: int, audio: int) -> dict[str, Any]:
    settings = {"text_proj_in_factor": _LAYERS + 1, "rope_type": "split", "connector_rope_base_seq_len": 64}
    for modality, width in (("video", video), ("audio", audio)):
        settings |= {
            f"{modality}_connector_num_attention_heads": 4,
            f"{modality}_connector_attention_head_dim": width // 4,
            f"{modality}_connector_num_layers": 1,
            f"{modality}_connector_num_learnable_registers": 16,
        }
    return settings


def _gemma(*, vocab_size: int) -> Gemma3ForConditionalGeneration:
    shape = {"num_hidden_layers": _LAYERS, "num_attention_heads": 4, "intermediate_size": 64}
    tokens = {"vocab_size": vocab_size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    attention = {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 32}
    config = Gemma3Config(
        text_config={"hidden_size": TEXT_DIM, **tokens, **attention, **shape},
        vision_config={"hidden_size": 16, "image_size": 16, "patch_size": 8, **shape},
        mm_tokens_per_image=4,
    )
    return Gemma3ForConditionalGeneration(config).eval()


def _vae() -> AutoencoderKLLTX2Video:
    vae = AutoencoderKLLTX2Video(
        latent_channels=CHANNELS,
        block_out_channels=(8, 16),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 16),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False, False, False),
        downsample_type=("spatiotemporal", "spatiotemporal"),
        upsample_type=("spatiotemporal", "spatiotemporal"),
        upsample_residual=(True, True),
        upsample_factor=(2, 2),
        patch_size=2,
        decoder_causal=False,
    ).eval()
    latents = latents_of_smooth_clips(vae)
    vae.latents_mean.copy_(latents.mean(1))
    vae.latents_std.copy_(latents.std(1))
    return vae


TINY = {
    "ltx2": partial(_ltx2, LTX2Pipeline),
    "ltx2-i2v": partial(_ltx23, LTX2ImageToVideoPipeline),
    "ltx2-in-context": partial(_ltx23, LTX2InContextPipeline),
}
