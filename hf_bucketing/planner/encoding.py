"""What encoding texts and media needs: the calls of text encoders and of the VAE, traced on shapes."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from ..buckets.sizes import Size
from ..models.experts import transformers_of
from ..models.loading import ModelPart, part_of, tile
from ..placement.sharding import HALF
from .components import Components
from .settings import PlanConfig
from .trace import TracedCall, trace_call
from .trackers import Kinds

_TRACED_LATENT_FRAMES = 3


def encode_texts(components: Components, config: PlanConfig, *, samples: int, pictures: int = 0) -> TracedCall:
    """Return what encoding captions needs: the weights of all that reads texts, and the most that one call makes.

    An encoder that sees pictures encodes captions one by one, and reads them as tokens. What it makes of these
    tokens before is less than what it makes of them then.

    Args:
        components ([`Components`]): Configurations of the pipeline.
        config ([`PlanConfig`]): What is planned for.
        samples (`int`): Number of captions.
        pictures (`int`): Tokens of the pictures that it sees with each.
    """
    length, together = config.run.max_sequence_length or components.recipe.default_sequence_length, samples
    if components.recipe.reference_condition().in_text or pictures:
        length, together = length + pictures, 1
    dtype = HALF.get(config.precision, torch.float32)
    calls = [_encode_text(encoder, together, length, dtype) for encoder in components.text_encoders]
    peak = Kinds(
        weights=sum(call.peak.weights for call in calls),
        activations=max((call.peak.activations for call in calls), default=0),
    )
    flops = sum(call.flops for call in calls) * samples / together
    return _with_others(components, config, "text_encoders", TracedCall(peak=peak, flops=flops))


def encode_media(components: Components, config: PlanConfig, *, size: Size, samples: int) -> TracedCall:
    """Return what encoding media needs: the weights of all that reads them, and what a call of the VAE makes.

    Args:
        components ([`Components`]): Configurations of the pipeline.
        config ([`PlanConfig`]): What is planned for.
        size ([`Size`]): Size of the samples, in pixels.
        samples (`int`): Samples of the call.
    """
    call = _encode_media(components, size, samples, config.run.memory.vae_tiling)
    return _with_others(components, config, "vae", call)


@functools.lru_cache(maxsize=64)
def _encode_text(component: Any, samples: int, length: int, dtype: torch.dtype) -> TracedCall:
    def call(model: Any, ids: torch.Tensor) -> None:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))

    longest = component.config.get("max_position_embeddings", length)  # CLIP takes 77 tokens
    ids = torch.empty(samples, min(length, longest), dtype=torch.int64, device="meta")
    return trace_call(component, call, ids, dtype=dtype)


@functools.lru_cache(maxsize=64)
def _encode_media(components: Components, size: Size, samples: int, tiling: bool) -> TracedCall:
    """Trace the encoding of samples; of long ones, from the first frames, as each more adds the same."""
    spec, few = components.spec, _TRACED_LATENT_FRAMES

    def traced(latent_frames: int) -> TracedCall:
        frames = (latent_frames - 1) * spec.temporal_stride + 1

        def call(vae: Any, pixels: torch.Tensor) -> None:
            if tiling:
                tile(vae, components.vae.class_name)
            pipeline, config = SimpleNamespace(vae=vae), components.transformer.config
            recipe = components.recipe(pipeline=pipeline, spec=spec, max_sequence_length=1, config=config)
            recipe.encode_latents(pixels)

        media = torch.empty(samples, 3, frames, size.height, size.width, device="meta")
        return trace_call(components.vae, call, media, dtype=torch.float32)

    latent_frames = spec.latent_size(size)[0] - spec.num_repeats  # which the recipe adds to those of the VAE
    if latent_frames <= few + 1:
        return traced(latent_frames)
    base, more = traced(few), traced(few + 1)
    return base.plus(more.plus(base, -1), latent_frames - few)


def _with_others(components: Components, config: PlanConfig, part: ModelPart, call: TracedCall) -> TracedCall:
    """Add the weights of what encodes texts or media beside text encoders and VAE; what they make is far less."""
    half = HALF.get(config.precision, torch.float32)
    weights = 0
    for name, component in components.others:
        if part_of(name, trained=transformers_of(config.run.trained_component)) == part:
            size = torch.float32.itemsize if name == "image_encoder" else half.itemsize
            weights += size * component.num_values()
    return call.plus(TracedCall(peak=Kinds(weights=weights)))
