"""The demo's pipeline: components of Wan's classes, of weights that were trained beforehand on generated clips."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from ..files import complete_folder
from .media import COLORS, DIRECTIONS, SHAPES

VAE_FILE = Path(__file__).with_name("demo_vae.safetensors")
"""Weights of the VAE, in float16, with the means and deviations of its latents; by `scripts/train_demo_vae.py`."""
TRANSFORMER_FILE = Path(__file__).with_name("demo_transformer.safetensors")
"""Weights of the transformer and the text encoder, in float16; by `scripts/train_demo_transformer.py`."""

CHANNELS = 16
"""Channels of a latent, as Wan's."""
_TEXT_DIM = 32
_VOCABULARY = 512
_WORDS = (*COLORS, *SHAPES, *DIRECTIONS, *"a picture of moving on dark bright background".split())

_VAE: dict[str, Any] = {
    "base_dim": 10,
    "decoder_base_dim": 14,
    "z_dim": CHANNELS,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 8,
}
"""Wan 2.2's blocks and patches of two pixels, at Wan 2.1's strides of 4 frames and 8×8 pixels."""


def make_demo_pipeline(folder: str | os.PathLike[str]) -> None:
    """Save the pipeline that `make demo` fine-tunes, a [`WanPipeline`][diffusers.WanPipeline] of a million weights.

    Its VAE, transformer and text encoder were trained on generated clips, the latter two on square ones of nine
    frames before bright backgrounds, with captions such as "a red square moving right on a bright background". The
    folder appears under its name only when it is complete, and replaces an earlier one.

    Args:
        folder (path): Folder to write.

    Raises:
        BucketingError: If the folder exists and is not a pipeline.
    """
    weights = load_file(TRANSFORMER_FILE)
    pipeline = WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=_filled(text_encoder(), weights, prefix="text_encoder."),
        transformer=_filled(transformer(), weights, prefix="transformer."),
        vae=trained_vae(VAE_FILE),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=2.0),
    )
    with complete_folder(folder, marker="model_index.json") as partial:
        pipeline.save_pretrained(str(partial))


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer to which each word of the demo's captions is one token, and other text bytes."""
    model = Tokenizer(BPE())
    model.pre_tokenizer = ByteLevel(add_prefix_space=True)
    model.decoder = decoders.ByteLevel()
    specials = ["<pad>", "</s>"]
    trainer = BpeTrainer(
        vocab_size=_VOCABULARY,
        min_frequency=1,
        special_tokens=specials,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator([f" {word}" for word in _WORDS], trainer)
    model.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token=specials[0], eos_token=specials[1])


def text_encoder() -> UMT5EncoderModel:
    """Return a text encoder of two layers with random weights."""
    shape = {"d_model": _TEXT_DIM, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return UMT5EncoderModel(UMT5Config(vocab_size=_VOCABULARY, **shape)).eval()


def transformer() -> WanTransformer3DModel:
    """Return a transformer of four blocks with random weights."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=22,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=_TEXT_DIM,
        freq_dim=64,
        ffn_dim=192,
        num_layers=4,
        cross_attn_norm=True,
        rope_max_seq_len=256,
    )


def vae(**latents: list[float]) -> AutoencoderKLWan:
    """Return a VAE with random weights, and with the `latents_mean` and `latents_std` given (0 and 1 by default)."""
    return AutoencoderKLWan(**_VAE, **{"latents_mean": [0.0] * CHANNELS, "latents_std": [1.0] * CHANNELS, **latents})


def trained_vae(file: Path) -> AutoencoderKLWan:
    """Return the VAE of a file that `scripts/train_demo_vae.py` wrote, in float32."""
    weights = load_file(file)
    latents = {name: weights.pop(name).tolist() for name in ("latents_mean", "latents_std")}
    return _filled(vae(**latents), weights)


def _filled(model: Any, weights: dict[str, torch.Tensor], *, prefix: str = "") -> Any:
    """Load the weights under a prefix into a model, and return it for evaluation."""
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    model.load_state_dict(own, strict=True)
    return model.eval()
