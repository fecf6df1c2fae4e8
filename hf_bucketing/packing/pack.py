"""Make packs of latents, timesteps and texts, and run them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..devices import to_device
from ..errors import PackingError
from .attachment import attachment_of
from .batch import PackedBatch, token_timesteps
from .context import bind_checkpoints, exact_inputs, exact_timesteps, use_layout
from .family import Family, output_of
from .layout import PackedLayout
from .names import Backend, Grid
from .strips import by_strip, to_strips, token_grid
from .texts import apply_text_mask, deduplicate
from .token_drop import Seed, TokenDrop


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A transformer's packing, as [`enable_packing`][hf_bucketing.models.enable_packing] returns it."""

    transformer: torch.nn.Module
    family: Family
    strip_length: int
    backend: Backend
    base_size: Grid | None = None

    def pack(
        self,
        latents: Sequence[torch.Tensor],
        *,
        timesteps: torch.Tensor | Sequence[torch.Tensor],
        text: Sequence[torch.Tensor] | torch.Tensor,
        text_mask: torch.Tensor | None = None,
        conditioning: Mapping[str, torch.Tensor | Sequence[torch.Tensor]] | None = None,
        token_drop: TokenDrop | None = None,
        seeds: Sequence[Seed] | None = None,
        pad_to: int | None = None,
        pad_text_to: int | None = None,
    ) -> PackedBatch:
        """Pack samples of any sizes.

        Args:
            latents (sequence of `(channels, frames, height, width)`): The samples, on one device and of one dtype.
            timesteps (`torch.Tensor` of shape `(n,)`, or sequence of `torch.Tensor`): One per sample, integers or at
                least `float32`: half precision rounds 999 to 1000. A sequence holds a tensor per sample, with one
                timestep per token, `(t·h·w,)`, or per frame of its token grid, `(t,)`, as for a clean first frame;
                for models that embed a timestep per token (`timestep_per_token` of the family).
            text (sequence of `(length, text_dim)`, or `torch.Tensor` of shape `(n, length, text_dim)`): The samples'
                texts. The model attends to every token, padding included: leave out what it must not see. One tensor
                given for several samples is stored once.
            text_mask (`torch.Tensor` of shape `(n, length)`, *optional*): Zero for the padding in `text`, which is
                then treated as the family's pipeline treats it: omitted (`text_rule` `"masked"`), attended to as
                zeros (`"keep_padding"`, such as Wan), or attended to unchanged (`"encoded_padding"`, such as SD3).
                Masks, here and in `conditioning`, make lengths: give them on the CPU, as reading them from a device
                waits for it.
            conditioning (mapping of `str` to `torch.Tensor` of shape `(n, …)`, *optional*): Further per-sample inputs
                of the transformer's forward, under its names; exactly those that the model needs. Those of a latent's
                size, such as a control video, are a sequence of `(channels, frames, height, width)`. The others may
                lie on the CPU: the model gets them on the device of the latents.
            token_drop ([`TokenDrop`], *optional*): Rule by which tokens are dropped from the pack; in training only.
            seeds (sequence of `int`, or of tuples of them, *optional*): Seeds of token drop, one per sample.
            pad_to (`int`, *optional*): Strips of the pack, reached by padding, so that all packs have one shape and
                `torch.compile` makes one graph of them.
            pad_text_to (`int`, *optional*): Text tokens of the pack, likewise. Where strips carry the text, the text
                slots of all strips: a multiple of `pad_to`.

        Returns:
            [`PackedBatch`].

        Raises:
            PackingError: If counts, channels, dtypes or devices differ, a latent does not divide into patches, a
                sample exceeds the model's positions, tokens cannot be dropped, or the pack exceeds its fixed shape.
        """
        given = self._check_conditioning({} if conditioning is None else conditioning, count=len(latents))
        patch = self.family.patch(self.transformer)
        texts = apply_text_mask(self.family.text_rule, text, mask=text_mask)
        self._check_timesteps(timesteps, count=len(latents))
        if not len(latents) == len(texts) == len(timesteps) or not len(latents):
            raise PackingError(
                f"A pack needs one text and one timestep per latent, got {len(latents)} latents, {len(texts)} texts "
                f"and {len(timesteps)} timesteps."
            )
        grids = tuple(token_grid(latent, patch, sample=sample) for sample, latent in enumerate(latents))
        self._check_tensors(latents, texts)
        if self.base_size is None:
            self.family.check_grids(self.transformer, grids)
        shared = self.family.shares_texts and pad_text_to is None
        stored, caption_ids = deduplicate(texts) if shared else (texts, None)
        layout = PackedLayout(
            grids=grids,
            text_lengths=tuple(map(len, texts)),
            strip_length=self.strip_length,
            device=latents[0].device,
            added_lengths=self.family.added_lengths(given),
            caption_ids=caption_ids,
            kept=self._kept(grids, token_drop, seeds, device=latents[0].device),
        )
        layout, pad_text_to = self.family.fit_text(self.transformer, layout, pad_to=pad_to, pad_text_to=pad_text_to)
        layout = replace(
            layout,
            padding_strips=_padding("strips", layout.num_strips, pad_to),
            text_padding=_padding("text tokens", layout.num_text_tokens, pad_text_to),
        )
        if not isinstance(timesteps, torch.Tensor):
            each = enumerate(zip(timesteps, grids, strict=True))
            timesteps = by_strip([token_timesteps(one, grid, sample=sample) for sample, (one, grid) in each], layout)
        batch = PackedBatch(
            strips=to_strips(latents, patch, layout=layout),
            timesteps=exact_timesteps(timesteps),
            text=F.pad(torch.cat(stored), (0, 0, 0, layout.text_padding)),
            layout=layout,
            patch=patch,
        )
        by_latent = self.family.latent_conditioning
        packed = {name: batch.pack_like(values) if name in by_latent else values for name, values in given.items()}
        return replace(batch, conditioning=packed)

    def _check_timesteps(self, timesteps: torch.Tensor | Sequence[torch.Tensor], *, count: int) -> None:
        """Refuse what is neither one timestep per sample nor, for models that take it, some per sample."""
        if isinstance(timesteps, torch.Tensor):
            if timesteps.ndim == 1:
                return
        elif isinstance(timesteps, Sequence) and all(torch.is_tensor(one) and one.ndim == 1 for one in timesteps):
            if self.family.timestep_per_token:
                return
            raise PackingError(
                f"{_name(self)} embeds one timestep per batch row, so all tokens of a sample have the same one: pass "
                f"a tensor of shape ({count},)."
            )
        got = f"shape {tuple(timesteps.shape)}" if isinstance(timesteps, torch.Tensor) else repr(timesteps)
        raise PackingError(
            f"`timesteps` must be a tensor of shape ({count},), one per sample, got {got:.200}; repeat a single one "
            "with torch.full, or pass a sequence of tensors, one per sample, with a timestep per token or frame."
        )

    def _check_tensors(self, latents: Sequence[torch.Tensor], texts: Sequence[torch.Tensor]) -> None:
        channels, text_dim = self.family.in_channels(self.transformer), self.family.text_dim(self.transformer)
        for sample, (latent, words) in enumerate(zip(latents, texts, strict=True)):
            if latent.shape[0] != channels:
                raise PackingError(f"Latent {sample} has {latent.shape[0]} channels; the model takes {channels}.")
            if words.ndim != 2 or words.shape[1] != text_dim:
                raise PackingError(f"Text {sample} has shape {tuple(words.shape)}; expected (length, {text_dim}).")
            for what, one, first in (("Latent", latent, latents[0]), ("Text", words, texts[0])):
                if (one.dtype, one.device) != (first.dtype, first.device):
                    raise PackingError(
                        f"{what} {sample} is {one.dtype} on {one.device}, and {what.lower()} 0 is {first.dtype} on "
                        f"{first.device}; a pack has one dtype on one device."
                    )

    def _kept(
        self, grids: Sequence[Grid], drop: TokenDrop | None, seeds: Sequence[Seed] | None, *, device: torch.device
    ) -> tuple[torch.Tensor, ...] | None:
        if drop is None:
            return None
        name = _name(self)
        if not self.family.drops_tokens:
            raise PackingError(f"{name} does more than attention across tokens; pack it without token_drop.")
        if not self.transformer.training:
            raise PackingError("Tokens are dropped in training only: call transformer.train(), or omit token_drop.")
        if seeds is None:
            raise PackingError("Token drop draws from the samples' own seeds; pass seeds=, one per sample.")
        kept = drop.kept(grids, seeds=seeds)
        if [len(tokens) for tokens in kept] == [math.prod(grid) for grid in grids]:
            return None
        return tuple(to_device(torch.from_numpy(tokens), device) for tokens in kept)

    def _check_conditioning(self, conditioning: Mapping[str, Any], *, count: int) -> Mapping[str, Any]:
        names, by_latent = list(self.family.conditioning(self.transformer)), self.family.latent_conditioning
        if not isinstance(conditioning, Mapping) or not all(
            torch.is_tensor(one) for name, one in conditioning.items() if name not in by_latent
        ):
            raise PackingError(
                f"`conditioning` must be a mapping of names to tensors of {count} rows, here of "
                f"{names or 'nothing'}; got {conditioning!r:.200}."
            )
        got = {
            name: (len(values),) if name in by_latent else tuple(values.shape) for name, values in conditioning.items()
        }
        if sorted(got) != sorted(names) or any(shape[:1] != (count,) for shape in got.values()):
            raise PackingError(
                f"This {_name(self)} needs conditioning {names or 'none'}, each with "
                f"{count} rows; got {got or 'none'}."
            )
        return conditioning


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
    attachment = attachment_of(transformer)
    attachment.check()
    packing = attachment.packing
    family = packing.family
    batch.layout.prepare(packing.backend, by_frame=family.by_frame, text_attends=family.text_attends)
    patch = packing.family.patch(packing.transformer)
    if batch.patch != patch:
        raise PackingError(
            f"This pack was made for a model with patches of {batch.patch}; this {_name(packing)} has patches of "
            f"{patch}. Make it with the packing of the transformer that runs it."
        )
    kwargs = {**packing.family.forward_kwargs(batch), **_attention_kwargs(packing, attention_kwargs)}
    bind_checkpoints(packing.transformer)
    with use_layout(batch.layout), exact_inputs(kwargs):
        output = output_of(transformer(**kwargs, return_dict=False))
    return packing.family.output_strips(batch, output)


def _attention_kwargs(packing: Packing, given: Mapping[str, float] | None) -> dict[str, Any]:
    if given is None:
        return {}
    name = packing.family.attention_kwargs
    if name is None:
        raise PackingError(
            f"The forward of {_name(packing)} takes no attention_kwargs; scale LoRA layers with set_adapters."
        )
    if set(given) != {"scale"}:
        raise PackingError(f"A pack takes nothing but 'scale' in attention_kwargs, got {sorted(given)}.")
    return {name: dict(given)}


def _name(packing: Packing) -> str:
    return type(packing.transformer).__name__


def _padding(what: str, count: int, fixed: int | None) -> int:
    if fixed is not None and fixed < count:
        raise PackingError(
            f"The pack has {count} {what}, more than the {fixed} to pad to; pad to more, or pack fewer samples."
        )
    return 0 if fixed is None else fixed - count
