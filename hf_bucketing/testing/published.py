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
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "wan-1.3b": {**_WAN, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "wan-14b": {**_WAN, "num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
}
"""Configurations of the transformers of Wan 2.1, by name."""

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
_INDEX = {
    "_class_name": "WanPipeline",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


def write_published_configs(folder: Path, name: str) -> None:
    """Write the configurations of Wan 2.1, `"wan-1.3b"` or `"wan-14b"`, as its pipeline on the hub holds them.

    Raises:
        BucketingError: If the name is unknown.
    """
    if name not in TRANSFORMERS:
        raise BucketingError(f"There are no configurations of {name!r}; choose one of {', '.join(TRANSFORMERS)}.")
    files = {
        "model_index.json": _INDEX,
        "transformer/config.json": {"_class_name": "WanTransformer3DModel", **TRANSFORMERS[name]},
        "vae/config.json": {"_class_name": "AutoencoderKLWan", "base_dim": 96, "z_dim": 16},
        "text_encoder/config.json": _UMT5_XXL,
    }
    for path, config in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(config, indent=2) + "\n")
