"""Configurations of published pipelines, to plan their memory without the hub."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers

from ..errors import BucketingError
from ..models.index import INDEX, MODULAR_INDEX

_WAN = {
    "patch_size": [1, 2, 2],
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
}
_LTX = {
    "in_channels": 128,
    "out_channels": 128,
    "patch_size": 1,
    "patch_size_t": 1,
    "num_attention_heads": 32,
    "activation_fn": "gelu-approximate",
    "qk_norm": "rms_norm_across_heads",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "caption_channels": 4096,
    "attention_bias": True,
    "attention_out_bias": True,
}
_DUAL_STREAM = {"num_attention_heads": 24, "attention_head_dim": 128, "pooled_projection_dim": 768}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "wan-1.3b": {**_WAN, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "wan-14b": {**_WAN, "num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
    # "Wan2.2-Animate-14B" in scripts/convert_wan_to_diffusers.py of huggingface/diffusers
    "wan-animate": {
        **_WAN,
        "num_attention_heads": 40,
        "ffn_dim": 13824,
        "num_layers": 40,
        "in_channels": 36,
        "image_dim": 1280,
        "added_kv_proj_dim": 5120,
    },
    # "Wan2.2-TI2V-5B" in scripts/convert_wan_to_diffusers.py of huggingface/diffusers
    "wan-5b": {
        **_WAN,
        "num_attention_heads": 24,
        "ffn_dim": 14336,
        "num_layers": 30,
        "in_channels": 48,
        "out_channels": 48,
    },
    # Versions 0.9.0 and 0.9.7 in scripts/convert_ltx_to_diffusers.py of huggingface/diffusers
    "ltx-2b": {**_LTX, "attention_head_dim": 64, "cross_attention_dim": 2048, "num_layers": 28},
    "ltx-13b": {**_LTX, "attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48},
    # Version 2.0 in scripts/convert_ltx2_to_diffusers.py of huggingface/diffusers
    "ltx-2": {
        **_LTX,
        "attention_head_dim": 128,
        "cross_attention_dim": 4096,
        "num_layers": 48,
        "caption_channels": 3840,
        "vae_scale_factors": [8, 32, 32],
        "pos_embed_max_pos": 20,
        "base_height": 2048,
        "base_width": 2048,
        "audio_in_channels": 128,
        "audio_out_channels": 128,
        "audio_patch_size": 1,
        "audio_patch_size_t": 1,
        "audio_num_attention_heads": 32,
        "audio_attention_head_dim": 64,
        "audio_cross_attention_dim": 2048,
        "audio_scale_factor": 4,
        "audio_pos_embed_max_pos": 20,
        "audio_sampling_rate": 16000,
        "audio_hop_length": 160,
        "rope_theta": 10000.0,
        "rope_double_precision": True,
        "rope_type": "split",
        "causal_offset": 1,
        "timestep_scale_multiplier": 1000,
        "cross_attn_timestep_scale_multiplier": 1000,
    },
    # transformer/config.json of hunyuanvideo-community/HunyuanVideo
    "hunyuan-video": {
        **_DUAL_STREAM,
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "patch_size_t": 1,
        "num_layers": 20,
        "num_single_layers": 40,
        "num_refiner_layers": 2,
        "text_embed_dim": 4096,
        "guidance_embeds": True,
        "rope_axes_dim": [16, 56, 56],
    },
    # "480p_t2v" in scripts/convert_hunyuan_video1_5_to_diffusers.py of huggingface/diffusers, which leaves the rest to
    # the defaults of its HunyuanVideo15Transformer3DModel; that file has "i2v" as the task, which changes no shape
    "hunyuan-video-1.5": {
        "in_channels": 65,
        "out_channels": 32,
        "num_attention_heads": 16,
        "attention_head_dim": 128,
        "num_layers": 54,
        "num_refiner_layers": 2,
        "mlp_ratio": 4.0,
        "patch_size": 1,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "text_embed_dim": 3584,
        "text_embed_2_dim": 1472,
        "image_embed_dim": 1152,
        "rope_theta": 256.0,
        "rope_axes_dim": [16, 56, 56],
        "target_size": 640,
        "task_type": "t2v",
        "use_meanflow": False,
    },
    # Defaults of QwenImageTransformer2DModel of huggingface/diffusers, which was written for this one model
    "qwen-image": {
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "axes_dims_rope": [16, 56, 56],
    },
    # Classes of huggingface/diffusers that were written for the one model that their defaults are: FLUX.2 [dev],
    # Z-Image, Krea 2 and MiniMax-H3. diffsynth/models of modelscope/DiffSynth-Studio (fed7b18) has the same numbers.
    "flux.2": {},
    "z-image": {},
    "krea-2": {},
    "minimax-h3": {},
    # transformer/config.json of black-forest-labs/FLUX.1-dev
    "flux": {
        **_DUAL_STREAM,
        "in_channels": 64,
        "patch_size": 1,
        "num_layers": 19,
        "num_single_layers": 38,
        "joint_attention_dim": 4096,
        "guidance_embeds": True,
    },
}
"""Configurations of transformers by name, each with where it was read; those of Wan 2.1 in the same file as the 5B."""

_UMT5_XXL = {
    "architectures": ["UMT5EncoderModel"],
    "model_type": "umt5",
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "vocab_size": 256384,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.1,
}
_T5_XXL = {**_UMT5_XXL, "architectures": ["T5EncoderModel"], "model_type": "t5", "vocab_size": 32128}
_CLIP_L = {
    "architectures": ["CLIPTextModel"],
    "model_type": "clip_text_model",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "vocab_size": 49408,
}
_LLAMA_8B = {
    "architectures": ["LlamaModel"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128320,
}
# diffsynth/models/qwen_image_text_encoder.py of modelscope/DiffSynth-Studio
_QWEN_TEXT_7B = {
    "model_type": "qwen2_5_vl_text",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
_QWEN_VL_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config": _QWEN_TEXT_7B,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
# t5x/examples/t5/byt5/small.gin of google-research/t5x; the fonts and colours that HunyuanVideo 1.5 adds to the
# vocabulary are not counted
_BYT5_SMALL = {
    **_T5_XXL,
    "d_model": 1472,
    "d_kv": 64,
    "d_ff": 3584,
    "num_layers": 12,
    "num_heads": 6,
    "vocab_size": 384,
}
# diffsynth/models/ltx2_text_encoder.py of modelscope/DiffSynth-Studio
_GEMMA_12B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
# vae22_diffusers_config in scripts/convert_wan_to_diffusers.py of huggingface/diffusers
_WAN_22_VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,  # the numbers take no memory
    "latents_std": [1.0] * 48,
}
# Versions 0.9.0 and 0.9.7 in scripts/convert_ltx_to_diffusers.py of huggingface/diffusers
_LTX_VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 128,
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["LTXVideoDownBlock3D"] * 4,
    "decoder_block_out_channels": [128, 256, 512, 512],
    "layers_per_block": [4, 3, 3, 3, 4],
    "decoder_layers_per_block": [4, 3, 3, 3, 4],
    "spatio_temporal_scaling": [True, True, True, False],
    "decoder_spatio_temporal_scaling": [True, True, True, False],
    "decoder_inject_noise": [False] * 5,
    "downsample_type": ["conv"] * 4,
    "upsample_residual": [False] * 4,
    "upsample_factor": [1] * 4,
    "patch_size": 4,
    "patch_size_t": 1,
    "resnet_norm_eps": 1e-6,
    "scaling_factor": 1.0,
    "encoder_causal": True,
    "decoder_causal": False,
    "timestep_conditioning": False,
}
_LTX_097_VAE = {
    **_LTX_VAE,
    "block_out_channels": [128, 256, 512, 1024, 2048],
    "down_block_types": ["LTXVideo095DownBlock3D"] * 4,
    "decoder_block_out_channels": [256, 512, 1024],
    "layers_per_block": [4, 6, 6, 2, 2],
    "decoder_layers_per_block": [5, 5, 5, 5],
    "spatio_temporal_scaling": [True] * 4,
    "decoder_spatio_temporal_scaling": [True] * 3,
    "decoder_inject_noise": [False] * 4,
    "downsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
    "upsample_residual": [True] * 3,
    "upsample_factor": [2] * 3,
    "timestep_conditioning": True,
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}
# Version 2.0 in scripts/convert_ltx2_to_diffusers.py of huggingface/diffusers
_LTX_2_VAE = {
    **_LTX_097_VAE,
    "block_out_channels": [256, 512, 1024, 2048],
    "down_block_types": ["LTX2VideoDownBlock3D"] * 4,
    "timestep_conditioning": False,
    "encoder_spatial_padding_mode": "zeros",
    "decoder_spatial_padding_mode": "reflect",
}
_LTX_2_AUDIO_VAE = {
    "base_channels": 128,
    "output_channels": 2,
    "ch_mult": [1, 2, 4],
    "num_res_blocks": 2,
    "attn_resolutions": None,
    "in_channels": 2,
    "resolution": 256,
    "latent_channels": 8,
    "norm_type": "pixel",
    "causality_axis": "height",
    "mid_block_add_attention": False,
    "sample_rate": 16000,
    "mel_hop_length": 160,
    "is_causal": True,
    "mel_bins": 64,
    "double_z": True,
}
_LTX_2_VOCODER = {
    "in_channels": 128,
    "hidden_channels": 1024,
    "out_channels": 2,
    "upsample_kernel_sizes": [16, 15, 8, 4, 4],
    "upsample_factors": [6, 5, 2, 2, 2],
    "resnet_kernel_sizes": [3, 7, 11],
    "resnet_dilations": [[1, 3, 5]] * 3,
    "leaky_relu_negative_slope": 0.1,
    "output_sampling_rate": 24000,
}
_LTX_2_CONNECTORS = {
    "caption_channels": 3840,
    "text_proj_in_factor": 49,
    **{
        f"{modality}_connector_{name}": value
        for modality in ("video", "audio")
        for name, value in {
            "num_attention_heads": 30,
            "attention_head_dim": 128,
            "num_layers": 2,
            "num_learnable_registers": 128,
        }.items()
    },
    "connector_rope_base_seq_len": 4096,
    "rope_theta": 10000.0,
    "rope_double_precision": True,
    "causal_temporal_positioning": False,
    "rope_type": "split",
}
# Defaults of the class, which was written for this one model
_QWEN_IMAGE_VAE = {"temperal_downsample": [False, True, True]}
_FLUX_VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
# diffsynth/models/flux2_text_encoder.py of modelscope/DiffSynth-Studio, as are the next ones, in files of their names
_MISTRAL_24B = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": {
        "model_type": "mistral",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131072,
        "max_position_embeddings": 131072,
        "sliding_window": None,
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "head_dim": 64,
        "image_size": 1540,
        "patch_size": 14,
    },
}
_QWEN3_4B = {
    "architectures": ["Qwen3Model"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def _qwen3_vl(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    rotary = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    text_config = {**_QWEN3_4B, **text, "model_type": "qwen3_vl_text", "rope_parameters": rotary}
    shared = {"model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304, "patch_size": 16}
    vision_config = {**shared, "out_hidden_size": text_config["hidden_size"], **vision}
    return {
        "architectures": ["Qwen3VLModel"],
        "model_type": "qwen3_vl",
        "text_config": text_config,
        "vision_config": vision_config,
    }


_QWEN3_VL_4B = _qwen3_vl(
    {}, {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
)
# Without the layers above 50, which the pipeline does not read, as in that file
_QWEN3_VL_32B = _qwen3_vl(
    {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 50, "num_attention_heads": 64},
    {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]},
)
_WAN_PIPELINE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "text_encoder": ("transformers", "UMT5EncoderModel", _UMT5_XXL),
    "vae": ("diffusers", "AutoencoderKLWan", {"base_dim": 96, "z_dim": 16}),
    "transformer": ("diffusers", "WanTransformer3DModel", {}),
}
_CLIP_VIT_H = {
    "architectures": ["CLIPVisionModel"],
    "model_type": "clip_vision_model",
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 224,
}
_LTX_PIPELINE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "text_encoder": ("transformers", "T5EncoderModel", _T5_XXL),
    "vae": ("diffusers", "AutoencoderKLLTXVideo", _LTX_VAE),
    "transformer": ("diffusers", "LTXVideoTransformer3DModel", {}),
}
_PIPELINES: dict[str, tuple[str, dict[str, tuple[str, str, dict[str, Any]]]]] = {
    "wan-1.3b": ("WanPipeline", _WAN_PIPELINE),
    "wan-14b": ("WanPipeline", _WAN_PIPELINE),
    "wan-animate": (
        "WanAnimatePipeline",
        {
            **_WAN_PIPELINE,
            "image_encoder": ("transformers", "CLIPVisionModel", _CLIP_VIT_H),
            "transformer": ("diffusers", "WanAnimateTransformer3DModel", {}),
        },
    ),
    "wan-5b": ("WanPipeline", {**_WAN_PIPELINE, "vae": ("diffusers", "AutoencoderKLWan", _WAN_22_VAE)}),
    "ltx-2b": ("LTXPipeline", _LTX_PIPELINE),
    "ltx-13b": (
        "LTXConditionPipeline",
        {**_LTX_PIPELINE, "vae": ("diffusers", "AutoencoderKLLTXVideo", _LTX_097_VAE)},
    ),
    "ltx-2": (
        "LTX2Pipeline",
        {
            "text_encoder": ("transformers", "Gemma3ForConditionalGeneration", _GEMMA_12B),
            "connectors": ("ltx2", "LTX2TextConnectors", _LTX_2_CONNECTORS),
            "vae": ("diffusers", "AutoencoderKLLTX2Video", _LTX_2_VAE),
            "audio_vae": ("diffusers", "AutoencoderKLLTX2Audio", _LTX_2_AUDIO_VAE),
            "vocoder": ("ltx2", "LTX2Vocoder", _LTX_2_VOCODER),
            "transformer": ("diffusers", "LTX2VideoTransformer3DModel", {}),
        },
    ),
    "hunyuan-video-1.5": (
        "HunyuanVideo15Pipeline",
        {
            "text_encoder": ("transformers", "Qwen2_5_VLTextModel", _QWEN_TEXT_7B),
            "text_encoder_2": ("transformers", "T5EncoderModel", _BYT5_SMALL),
            # Defaults of the class, as the converter of the transformer makes it
            "vae": ("diffusers", "AutoencoderKLHunyuanVideo15", {}),
            "transformer": ("diffusers", "HunyuanVideo15Transformer3DModel", {}),
        },
    ),
    "qwen-image": (
        "QwenImagePipeline",
        {
            "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration", _QWEN_VL_7B),
            "vae": ("diffusers", "AutoencoderKLQwenImage", _QWEN_IMAGE_VAE),
            "transformer": ("diffusers", "QwenImageTransformer2DModel", {}),
        },
    ),
    "flux.2": (
        "Flux2Pipeline",
        {
            "text_encoder": ("transformers", "Mistral3ForConditionalGeneration", _MISTRAL_24B),
            "vae": ("diffusers", "AutoencoderKLFlux2", {}),
            "transformer": ("diffusers", "Flux2Transformer2DModel", {}),
        },
    ),
    "z-image": (
        "ZImagePipeline",
        {
            "text_encoder": ("transformers", "Qwen3Model", _QWEN3_4B),
            "vae": ("diffusers", "AutoencoderKL", _FLUX_VAE),
            "transformer": ("diffusers", "ZImageTransformer2DModel", {}),
        },
    ),
    "krea-2": (
        "Krea2Pipeline",
        {
            "text_encoder": ("transformers", "Qwen3VLModel", _QWEN3_VL_4B),
            "vae": ("diffusers", "AutoencoderKLQwenImage", _QWEN_IMAGE_VAE),
            "transformer": ("diffusers", "Krea2Transformer2DModel", {}),
        },
    ),
    "minimax-h3": (
        "MiniMaxH3ModularPipeline",
        {
            "text_encoder": ("transformers", "Qwen3VLModel", _QWEN3_VL_32B),
            "vae": ("diffusers", "AutoencoderKLMiniMaxH3", {}),
            "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio", {}),
            "transformer": ("diffusers", "MiniMaxH3Transformer3DModel", {}),
        },
    ),
    "hunyuan-video": (
        "HunyuanVideoPipeline",
        {
            "text_encoder": ("transformers", "LlamaModel", _LLAMA_8B),
            "text_encoder_2": ("transformers", "CLIPTextModel", _CLIP_L),
            "vae": ("diffusers", "AutoencoderKLHunyuanVideo", {}),
            "transformer": ("diffusers", "HunyuanVideoTransformer3DModel", {}),
        },
    ),
    "flux": (
        "FluxPipeline",
        {
            "text_encoder": ("transformers", "CLIPTextModel", _CLIP_L),
            "text_encoder_2": ("transformers", "T5EncoderModel", _T5_XXL),
            "vae": ("diffusers", "AutoencoderKL", _FLUX_VAE),
            "transformer": ("diffusers", "FluxTransformer2DModel", {}),
        },
    ),
}
"""Pipeline class of each, and its models: library, class and configuration; that of the transformer is above."""


def write_published_configs(folder: Path, name: str) -> None:
    """Write the configurations of a published pipeline, as that on the hub holds them.

    Args:
        folder (`Path`): Folder to write to.
        name (`str`): Key of `TRANSFORMERS`: `"wan-1.3b"` or `"wan-14b"` (Wan 2.1), `"wan-5b"` (Wan 2.2 TI2V),
            `"wan-animate"`, `"ltx-2b"`, `"ltx-13b"`, `"ltx-2"`, `"hunyuan-video"`, `"hunyuan-video-1.5"`,
            `"qwen-image"`, `"flux.2"` (dev), `"z-image"`, `"krea-2"`, `"minimax-h3"`, or `"flux"` (Flux.1 dev).

    Raises:
        BucketingError: If the name is unknown.
    """
    if name not in TRANSFORMERS:
        raise BucketingError(f"There are no configurations of {name!r}; choose one of {', '.join(TRANSFORMERS)}.")
    pipeline_class, models = _PIPELINES[name]
    index = {component: [library, class_name] for component, (library, class_name, _) in models.items()}
    files: dict[str, dict[str, Any]] = {INDEX: {"_class_name": pipeline_class, **index}}
    if "Modular" in pipeline_class:
        places = {name: [*entry, {"type_hint": entry, "subfolder": name}] for name, entry in index.items()}
        files = {MODULAR_INDEX: {"_class_name": pipeline_class, **places}}
    for component, (library, class_name, config) in models.items():
        given = TRANSFORMERS[name] if component == "transformer" else config
        defaults = _defaults(class_name) if library == "diffusers" else {}
        named = {} if library == "transformers" else {"_class_name": class_name}
        files[f"{component}/config.json"] = {**named, **defaults, **given}
    for path, config in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(config, indent=2) + "\n")


def _defaults(class_name: str) -> dict[str, Any]:
    """Return the defaults of a class of diffusers: saved configurations hold all settings."""
    settings = inspect.signature(getattr(diffusers, class_name)).parameters.values()
    return {setting.name: setting.default for setting in settings if setting.default is not setting.empty}
