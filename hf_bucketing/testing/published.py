"""Configurations of published pipelines, to plan their memory without the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import BucketingError

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
_DUAL_STREAM = {"num_attention_heads": 24, "attention_head_dim": 128, "pooled_projection_dim": 768}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "wan-1.3b": {**_WAN, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "wan-14b": {**_WAN, "num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
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
"""Configurations of the transformers of Wan 2.1, HunyuanVideo and Flux.1 dev, by name."""

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
_WAN_PIPELINE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "text_encoder": ("transformers", "UMT5EncoderModel", _UMT5_XXL),
    "vae": ("diffusers", "AutoencoderKLWan", {"base_dim": 96, "z_dim": 16}),
    "transformer": ("diffusers", "WanTransformer3DModel", {}),
}
_PIPELINES: dict[str, tuple[str, dict[str, tuple[str, str, dict[str, Any]]]]] = {
    "wan-1.3b": ("WanPipeline", _WAN_PIPELINE),
    "wan-14b": ("WanPipeline", _WAN_PIPELINE),
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
        name (`str`): `"wan-1.3b"` or `"wan-14b"` (Wan 2.1), `"hunyuan-video"`, or `"flux"` (Flux.1 dev).

    Raises:
        BucketingError: If the name is unknown.
    """
    if name not in TRANSFORMERS:
        raise BucketingError(f"There are no configurations of {name!r}; choose one of {', '.join(TRANSFORMERS)}.")
    pipeline_class, models = _PIPELINES[name]
    index = {component: [library, class_name] for component, (library, class_name, _) in models.items()}
    files: dict[str, dict[str, Any]] = {"model_index.json": {"_class_name": pipeline_class, **index}}
    for component, (library, class_name, config) in models.items():
        given = TRANSFORMERS[name] if component == "transformer" else config
        named = {"_class_name": class_name} if library == "diffusers" else {}
        files[f"{component}/config.json"] = {**named, **given}
    for path, config in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(config, indent=2) + "\n")
