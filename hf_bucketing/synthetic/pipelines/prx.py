"""Pipelines of PRX with small random weights, of both kinds of VAE."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from diffusers import (
    AutoencoderDC,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    PRXPipeline,
    PRXTransformer2DModel,
)
from diffusers.pipelines import prx
from transformers import ByT5Tokenizer, T5GemmaConfig

from .components import CHANNELS, TEXT_DIM, image_vae


def _text_encoder(vocab_size: int) -> Any:
    """Return a text encoder that saves the configuration which diffusers expects, that of its decoder included."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    shape = {"vocab_size": vocab_size, "hidden_size": TEXT_DIM, "intermediate_size": 64, "num_hidden_layers": 2}
    config = T5GemmaConfig(encoder={**shape, **heads}, decoder={**shape, **heads}, vocab_size=vocab_size)
    encoder = prx.T5GemmaEncoder(config.encoder).eval()

    def save_pretrained(folder: str, **options: Any) -> None:
        type(encoder).save_pretrained(encoder, folder, **options)
        config.save_pretrained(folder)

    encoder.save_pretrained = save_pretrained
    return encoder


def _autoencoder() -> AutoencoderDC:
    blocks: dict[str, Any] = {f"{side}_block_types": ("ResBlock",) * 6 for side in ("encoder", "decoder")}
    blocks |= {f"{side}_block_out_channels": (8,) * 6 for side in ("encoder", "decoder")}
    blocks |= {f"{side}_layers_per_block": (1,) * 6 for side in ("encoder", "decoder")}
    blocks |= {f"{side}_qkv_multiscales": ((),) * 6 for side in ("encoder", "decoder")}
    return AutoencoderDC(latent_channels=CHANNELS, attention_head_dim=4, scaling_factor=0.8, **blocks).eval()


def _text_to_image(make_vae: Callable[[], Any], *, patch: int) -> DiffusionPipeline:
    tokenizer = ByT5Tokenizer(model_max_length=256)
    pipeline = PRXPipeline(
        tokenizer=tokenizer,
        text_encoder=_text_encoder(len(tokenizer)),
        vae=make_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=PRXTransformer2DModel(
            in_channels=CHANNELS,
            patch_size=patch,
            context_in_dim=TEXT_DIM,
            hidden_size=32,
            num_heads=2,
            depth=2,
            axes_dim=[8, 8],
        ),
    )
    # the published name of its place; diffusers would write another, where it does not find it again
    pipeline.register_to_config(text_encoder=("prx", "T5GemmaEncoder"))
    return pipeline


TINY = {
    "prx": partial(_text_to_image, partial(image_vae, shift_factor=0.1), patch=2),
    "prx-dc": partial(_text_to_image, _autoencoder, patch=1),
}
