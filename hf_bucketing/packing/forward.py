"""Run packs through the transformer's own forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import PackingError
from .attachment import attachment_of
from .audio import AudioLayout
from .batch import PackedBatch
from .context import bind_checkpoints, exact_inputs, use_layout
from .family import Family, output_of
from .pack import Packing


def packed_forward(
    transformer: torch.nn.Module, batch: PackedBatch, *, attention_kwargs: Mapping[str, float] | None = None
) -> torch.Tensor:
    """Run a pack through the transformer's own forward.

    Args:
        transformer (`torch.nn.Module`): A transformer with packing enabled, bare or wrapped by `accelerator.prepare`.
        batch ([`PackedBatch`]): A pack made by that transformer's packing.
        attention_kwargs (mapping, *optional*): `{"scale": …}`, the factor of LoRA layers in this forward, for models
            whose own forward takes it; some name the argument `joint_attention_kwargs`.

    Returns:
        `torch.Tensor` of shape `(num_strips, out_channels, p_t, p_h, strip_length·p_w)`; see [`PackedBatch.unpack`].

    Raises:
        PackingError: If packing is not enabled, or the model was changed since (by another processor, fused
            projections, another `forward`, a hook), the pack was made for another patch, or the model does not take
            `attention_kwargs`.
    """
    result, family = _run(transformer, batch, attention_kwargs)
    return family.output_strips(batch, output_of(result))


def packed_forward_with_audio(
    transformer: torch.nn.Module, batch: PackedBatch, *, attention_kwargs: Mapping[str, float] | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run a pack with audio, as [`packed_forward`], and return its strips and the audio of each sample.

    Returns:
        `tuple`: Strips, and a list of one `torch.Tensor` of shape `(tokens, channels)` per sample, of no tokens where
        a sample has no audio.

    Raises:
        PackingError: If the pack has no audio; and as [`packed_forward`].
    """
    audio = AudioLayout.of(batch.layout)
    if audio is None:
        raise PackingError("This pack holds no audio: give `audio` to pack, or call packed_forward.")
    result, family = _run(transformer, batch, attention_kwargs)
    rows = family.audio_rows(result)
    if family.shared_audio:  # processes that share a pack fill its rows up to equal parts
        rows = rows[:, : audio.row_length]
    return family.output_strips(batch, output_of(result)), audio.by_sample(rows)


def _run(
    transformer: torch.nn.Module, batch: PackedBatch, attention_kwargs: Mapping[str, float] | None
) -> tuple[Any, Family]:
    """Return what the transformer's forward returns for a pack, and the family of the transformer."""
    attachment = attachment_of(transformer)
    attachment.check()
    packing, family = attachment.packing, attachment.packing.family
    processors = (attention.packed for attention in attachment.attentions)
    batch.layout.prepare(
        packing.backend, (segments for processor in processors for segments in processor.segments(batch.layout))
    )
    patch = family.patch(packing.transformer.config)
    if batch.patch != patch:
        raise PackingError(
            f"This pack was made for a model with patches of {batch.patch}; this {packing.model_name} has patches of "
            f"{patch}. Make it with the packing of the transformer that runs it."
        )
    kwargs = {**family.inputs(family.rows(batch)), **_attention_kwargs(packing, attention_kwargs)}
    bind_checkpoints(packing.transformer)
    with use_layout(batch.layout), exact_inputs(kwargs, cast=family.cast_inputs):
        return transformer(**kwargs, return_dict=False), family


def _attention_kwargs(packing: Packing, settings: Mapping[str, float] | None) -> dict[str, Any]:
    """Return the settings of LoRA layers under the name that the transformer's forward has for them."""
    if settings is None:
        return {}
    name = packing.family.attention_kwargs
    if name is None:
        raise PackingError(
            f"The forward of {packing.model_name} takes no attention_kwargs; scale LoRA layers with set_adapters."
        )
    if set(settings) != {"scale"}:
        raise PackingError(f"A pack takes nothing but 'scale' in attention_kwargs, got {sorted(settings)}.")
    return {name: dict(settings)}
