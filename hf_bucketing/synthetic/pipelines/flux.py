"""Pipelines of FLUX.1, Chroma, Ovis-Image, LongCat-Image and Bria 3.2 with small random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import (
    BriaPipeline,
    BriaTransformer2DModel,
    ChromaPipeline,
    ChromaTransformer2DModel,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxControlPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    LongCatImagePipeline,
    LongCatImageTransformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
)
from transformers import CLIPTextModel, Qwen3Model, T5EncoderModel

from ...models.families.flux import BLOCK
from .components import (
    CHANNELS,
    CLIP_DIM,
    TEXT_DIM,
    chat_components,
    clip_components,
    empty_pipeline,
    image_vae,
    numbered,
    qwen3_vl,
    t5_components,
    template_tokenizer,
)

_TOKEN = CHANNELS * BLOCK**2
"""Channels of a token."""
_LONGCAT_CHANNELS = 16
"""Channels of a latent of LongCat-Image, a number that the pipeline's call does not read from any configuration."""
_WIDE: dict[str, Any] = {"attention_head_dim": 24, "num_attention_heads": 4, "axes_dims_rope": (4, 10, 10)}
_NARROW: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 6, 6)}


def _pipeline(
    kind: type[DiffusionPipeline],
    text: dict[str, Any],
    transformer: type[Any],
    *,
    channels: int = CHANNELS,
    shift: float = 3.0,
    shifts_by_size: bool = True,
    **config: Any,
) -> DiffusionPipeline:
    shape = {"in_channels": channels * BLOCK**2, "joint_attention_dim": TEXT_DIM}
    layers = {"num_layers": 2, "num_single_layers": 2}
    return kind(
        **text,
        vae=image_vae(shift_factor=0.1, latent_channels=channels),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=shifts_by_size),
        transformer=transformer(**{**shape, **layers, **config}),
    )


def _flux(kind: type[DiffusionPipeline], **config: Any) -> DiffusionPipeline:
    text = {**clip_components(CLIPTextModel), **numbered(t5_components(T5EncoderModel), 2)}
    config |= {"pooled_projection_dim": CLIP_DIM, "guidance_embeds": True, **_WIDE}
    return _pipeline(kind, text, FluxTransformer2DModel, **config)


def _chroma() -> DiffusionPipeline:
    return _pipeline(
        ChromaPipeline,
        t5_components(T5EncoderModel),
        ChromaTransformer2DModel,
        shift=1.0,
        approximator_num_channels=16,
        approximator_hidden_dim=32,
        approximator_layers=2,
        **_WIDE,
    )


def _ovis_image() -> DiffusionPipeline:
    empty = empty_pipeline(OvisImagePipeline)
    text = chat_components(Qwen3Model, empty.system_prompt, empty.user_prompt_begin_id)
    return _pipeline(
        OvisImagePipeline, text, OvisImageTransformer2DModel, out_channels=_TOKEN, num_layers=1, **_NARROW
    )


def _longcat_image() -> DiffusionPipeline:
    from transformers import Qwen3VLForConditionalGeneration  # which an older transformers does not have

    tokenizer = template_tokenizer(empty_pipeline(LongCatImagePipeline).prompt_template_encode_prefix, 1)
    text = {
        "tokenizer": tokenizer,
        "text_processor": None,  # which rewrites prompts, and needs torchvision
        "text_encoder": qwen3_vl(len(tokenizer), kind=Qwen3VLForConditionalGeneration),
    }
    return _pipeline(
        LongCatImagePipeline,
        text,
        LongCatImageTransformer2DModel,
        channels=_LONGCAT_CHANNELS,
        num_layers=1,
        pooled_projection_dim=TEXT_DIM,
        **_NARROW,
    )


def _bria() -> DiffusionPipeline:
    return _pipeline(
        BriaPipeline,
        t5_components(T5EncoderModel),
        BriaTransformer2DModel,
        shifts_by_size=False,
        pooled_projection_dim=None,
        **_NARROW,
    )


TINY = {
    "flux": partial(_flux, FluxPipeline),
    "flux-control": partial(_flux, FluxControlPipeline, in_channels=2 * _TOKEN, out_channels=_TOKEN),
    "flux-kontext": partial(_flux, FluxKontextPipeline),
    "chroma": _chroma,
    "ovis-image": _ovis_image,
    "longcat-image": _longcat_image,
    "bria": _bria,
}
