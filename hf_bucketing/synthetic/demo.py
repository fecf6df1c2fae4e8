"""The demo's pipeline: components of Wan's classes, of weights that were trained beforehand on generated clips."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
"""The components that the VAE keeps of 8×8 pixels; by `scripts/benchmarks/fit_demo_vae.py`."""
TRANSFORMER_FILE = Path(__file__).with_name("demo_transformer.safetensors")
"""Weights of the transformer and the text encoder, in float16; by `scripts/benchmarks/train_demo_transformer.py`."""

CHANNELS = 12
"""Channels of a latent."""
SIDE = 8
"""Rows and columns of pixels that one latent stands for."""
_TEXT_DIM = 32
_VOCABULARY = 512
_WORDS = (*COLORS, *SHAPES, *DIRECTIONS, "a", "picture", "of", "moving", "on", "dark", "bright", "background")
_LARGE = 200.0
"""Value of a constant channel, beside which the norms of the VAE change nothing: they only divide by it."""


def make_demo_pipeline(folder: str | os.PathLike[str]) -> None:
    """Save the pipeline that `make demo` fine-tunes, a [`WanPipeline`][diffusers.WanPipeline] of a million weights.

    Its VAE was fitted to generated clips. Its transformer and text encoder were trained on such clips before bright
    backgrounds alone, with captions such as "a red square moving right on a bright background". The folder appears
    under its name only when it is complete, and replaces an earlier one.

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
        vae=fitted_vae(load_file(VAE_FILE)),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
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
    """Return a transformer of three blocks with random weights."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=_TEXT_DIM,
        freq_dim=64,
        ffn_dim=192,
        num_layers=3,
        cross_attn_norm=True,
        rope_max_seq_len=256,
    )


@torch.no_grad()
def fitted_vae(fit: Mapping[str, torch.Tensor]) -> AutoencoderKLWan:
    """Return a VAE whose encoder and decoder are linear: principal components of blocks of one frame.

    AutoencoderKLWan's patches bring a block's pixels into channels, and its blocks without the weights of their last
    layers change nothing. What is left are two norms, which a large constant channel turns into divisions, and two
    activations, before which each component stands with both signs, as silu(x) − silu(−x) = x.

    Args:
        fit (mapping of `str` to `torch.Tensor`): `mean` of the blocks, of shape `(192,)`, and `components`, of shape
            `(12, 192)`: the product of one with a block less the mean is a latent, and all together have deviation 1.
            `blocks` of the same shape are what a latent of 1 adds to a decoded block.
    """
    both = 2 * CHANNELS
    vae = AutoencoderKLWan(
        base_dim=both + 1,
        z_dim=CHANNELS,
        dim_mult=[1],
        num_res_blocks=0,
        temperal_downsample=[],
        patch_size=SIDE,
        in_channels=3 * SIDE**2,
        out_channels=3 * SIDE**2,
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
        scale_factor_temporal=1,
        scale_factor_spatial=SIDE,
    )
    for parameter in vae.parameters():
        parameter.zero_()
    components, blocks, mean = fit["components"], fit["blocks"], fit["mean"]
    signs = torch.cat([torch.eye(CHANNELS), -torch.eye(CHANNELS)])
    for coder, matrix, offset in (
        (vae.encoder, signs @ components, -signs @ components @ mean),
        (vae.decoder, signs, torch.zeros(both)),
    ):
        coder.conv_in.weight[:both, :, -1, 1, 1] = matrix  # the kernel's last frame is the present one
        coder.conv_in.bias[:both] = offset
        coder.conv_in.bias[both] = _LARGE
        coder.norm_out.gamma.fill_(_LARGE / (both + 1) ** 0.5)
    vae.encoder.conv_out.weight[:CHANNELS, :both, -1, 1, 1] = signs.T
    vae.encoder.conv_out.bias[CHANNELS:] = -20.0  # logarithm of the variance
    vae.decoder.conv_out.weight[:, :both, -1, 1, 1] = blocks.T @ signs.T
    vae.decoder.conv_out.bias[:] = mean
    for convolution in (vae.quant_conv, vae.post_quant_conv):
        convolution.weight[..., 0, 0, 0] = torch.eye(len(convolution.weight))
    return vae.eval()


def _filled(model: Any, weights: dict[str, torch.Tensor], *, prefix: str = "") -> Any:
    """Load the weights under a prefix into a model, and return it for evaluation."""
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(own.pop(name))
    assert not own, f"weights of no parameter: {sorted(own)}"
    return model.eval()
