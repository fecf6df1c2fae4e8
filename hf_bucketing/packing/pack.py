"""Make packs of latents, timesteps and texts, and run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from accelerate.utils import extract_model_from_parallel

from ..errors import PackingError
from .context import bind_checkpoints, use_layout
from .families import Family, JointFamily
from .families.base import TextRule
from .layout import Grid, PackedLayout
from .strips import from_strips, to_strips, token_grid

ATTRIBUTE = "_hf_bucketing_packing"
"""Name under which a transformer carries its [`Packing`]."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A pack: what one process runs as one sequence.

    Attributes:
        strips (`torch.Tensor` of shape `(rows, channels, p_t, p_h, strip_length·p_w)`): The latents.
        timesteps (`torch.Tensor` of shape `(n,)`): One per sample.
        text (`torch.Tensor` of shape `(stored text tokens, text_dim)`): All texts, one after the other; a text that
            several samples share is there once (`layout.text_index`), where the family only attends to it.
        layout ([`PackedLayout`]): Where each sample lies.
        patch (`tuple` of three `int`): Latent frames, rows and columns per token.
        conditioning (mapping of `str` to `torch.Tensor` of shape `(n, …)`): What else the model is told per sample.
    """

    strips: torch.Tensor
    timesteps: torch.Tensor
    text: torch.Tensor
    layout: PackedLayout
    patch: tuple[int, int, int]
    conditioning: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def row_timesteps(self) -> torch.Tensor:
        """The timestep of each strip; shape `(rows,)`."""
        return self.timesteps[self.layout.row_segments]

    def unpack(self, prediction: torch.Tensor) -> list[torch.Tensor]:
        """Return one `(channels, frames, height, width)` tensor per sample.

        Raises:
            PackingError: If the prediction is not of this pack.
        """
        return from_strips(prediction, self.layout)

    def pack_like(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pack targets, noise or masks as the latents are packed: `(rows, channels, p_t, p_h, strip_length·p_w)`.

        Args:
            tensors (sequence of `(channels, frames, height, width)`): Sized as the latents; any number of channels.

        Raises:
            PackingError: If their number or a size differs.
        """
        grids = tuple(token_grid(tensor, self.patch, sample=sample) for sample, tensor in enumerate(tensors))
        if grids != self.layout.grids:
            raise PackingError(f"Expected tensors with the token grids {self.layout.grids}, got {grids}.")
        return to_strips(tensors, self.patch, layout=self.layout)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A transformer's packing, as [`enable_packing`] returns it."""

    transformer: torch.nn.Module
    family: Family
    strip_length: int
    detach: Callable[[], None]
    base_size: Grid | None = None

    def pack(
        self,
        latents: Sequence[torch.Tensor],
        *,
        timesteps: torch.Tensor,
        text: Sequence[torch.Tensor] | torch.Tensor,
        text_mask: torch.Tensor | None = None,
        conditioning: Mapping[str, torch.Tensor] | None = None,
    ) -> PackedBatch:
        """Pack samples of any sizes.

        Args:
            latents (sequence of `(channels, frames, height, width)`): On one device, of one dtype.
            timesteps (`torch.Tensor` of shape `(n,)`): One per sample.
            text (sequence of `(length, text_dim)`, or `torch.Tensor` of shape `(n, length, text_dim)`): Every token
                is attended to, also padding: leave out what the model must not see. One tensor given for several
                samples is stored once.
            text_mask (`torch.Tensor` of shape `(n, length)`, *optional*): Zero for the padding in `text`, which is
                then treated as the family's pipeline does: left out (`text_rule` `"masked"`), attended to as zeros
                (`"keep_padding"`, such as Wan), or attended to as it is (`"encoded_padding"`, such as SD3).
            conditioning (mapping of `str` to `torch.Tensor` of shape `(n, …)`, *optional*): Further per-sample inputs
                of the transformer's own forward, under its names; those that the family needs, and no others.

        Returns:
            [`PackedBatch`].

        Raises:
            PackingError: If counts or channels differ, a latent does not divide into patches, or a sample is beyond
                the model's positions.
        """
        conditioning = self._check_conditioning(conditioning or {}, count=len(latents))
        patch, channels = self.family.patch(self.transformer), self.family.in_channels(self.transformer)
        texts = _texts(text, text_mask, self.family.text_rule)
        if not len(latents) == len(texts) == len(timesteps) or timesteps.ndim != 1 or not len(latents):
            raise PackingError(
                f"A pack needs one text and one timestep per latent, got {len(latents)} latents, {len(texts)} texts "
                f"and timesteps of shape {tuple(timesteps.shape)}."
            )
        grids = tuple(token_grid(latent, patch, sample=sample) for sample, latent in enumerate(latents))
        for sample, (latent, words) in enumerate(zip(latents, texts, strict=True)):
            if latent.shape[0] != channels:
                raise PackingError(f"Latent {sample} has {latent.shape[0]} channels; the model takes {channels}.")
            if words.ndim != 2 or words.shape[1] != self.family.text_dim(self.transformer):
                raise PackingError(
                    f"Text {sample} has shape {tuple(words.shape)}; expected (length, "
                    f"{self.family.text_dim(self.transformer)})."
                )
        if self.base_size is None:
            self.family.check_grids(self.transformer, grids)
        stored, caption_ids = _distinct(texts) if self.family.shares_texts else (texts, None)
        layout = PackedLayout(
            grids=grids,
            text_lengths=tuple(map(len, texts)),
            strip_length=self.strip_length,
            device=latents[0].device,
            caption_ids=caption_ids,
        )
        if isinstance(self.family, JointFamily):
            layout = self.family.with_text_slots(self.transformer, layout)
        return PackedBatch(
            strips=to_strips(latents, patch, layout=layout),
            timesteps=timesteps,
            text=torch.cat(stored),
            layout=layout,
            patch=patch,
            conditioning=conditioning,
        )

    def _check_conditioning(
        self, conditioning: Mapping[str, torch.Tensor], *, count: int
    ) -> Mapping[str, torch.Tensor]:
        names = self.family.conditioning(self.transformer)
        if sorted(conditioning) != sorted(names) or any(len(values) != count for values in conditioning.values()):
            got = {name: tuple(values.shape) for name, values in conditioning.items()}
            raise PackingError(
                f"This {type(self.transformer).__name__} needs conditioning {list(names) or 'none'}, each with "
                f"{count} rows; got {got or 'none'}."
            )
        return conditioning


def packed_forward(transformer: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Run a pack through the transformer's own forward.

    Args:
        transformer (`torch.nn.Module`): One with packing enabled, as it is or wrapped by `accelerator.prepare`.
        batch ([`PackedBatch`]): From that transformer's packing.

    Returns:
        `torch.Tensor` of shape `(rows, out_channels, p_t, p_h, strip_length·p_w)`: See [`PackedBatch.unpack`].

    Raises:
        PackingError: If packing is not enabled.
    """
    packing = packing_of(transformer)
    with use_layout(batch.layout), bind_checkpoints(packing.transformer, batch.layout):
        output = transformer(**packing.family.forward_kwargs(batch), return_dict=False)[0]
    return packing.family.output_strips(batch, output)


def packing_of(transformer: torch.nn.Module) -> Packing:
    """Return the packing of a transformer, wrapped or not.

    Raises:
        PackingError: If packing is not enabled.
    """
    packing: Packing | None = getattr(unwrap(transformer), ATTRIBUTE, None)
    if packing is None:
        raise PackingError("Packing is not enabled on this transformer; call enable_packing(transformer) first.")
    return packing


def unwrap(transformer: torch.nn.Module) -> torch.nn.Module:
    """Return the transformer inside the wrappers of accelerate, torch.compile and peft."""
    model = extract_model_from_parallel(transformer, keep_torch_compile=False)
    # peft's PeftModel, told by what it offers, as peft need not be installed
    base: torch.nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


def _texts(
    text: Sequence[torch.Tensor] | torch.Tensor, mask: torch.Tensor | None, rule: TextRule
) -> list[torch.Tensor]:
    if mask is None:
        return list(text)
    if not isinstance(text, torch.Tensor) or text.shape[:2] != mask.shape:
        raise PackingError("text_mask of shape (n, length) goes with a text tensor of shape (n, length, text_dim).")
    if rule == "encoded_padding":
        return list(text)
    if rule == "keep_padding":
        return list(text.masked_fill(~mask.bool()[..., None], 0))
    return [words[keep.bool()] for words, keep in zip(text, mask, strict=True)]


def _distinct(texts: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """Return the texts that differ as memory, and which of them each sample reads: contents are not compared."""
    stored: dict[tuple[object, ...], tuple[int, torch.Tensor]] = {}
    # without memory of its own (meta tensors, empty texts) a tensor is only itself
    keys = [(words.data_ptr() or id(words), words.shape, words.stride(), words.requires_grad) for words in texts]
    for key, words in zip(keys, texts, strict=True):
        stored.setdefault(key, (len(stored), words))
    return [words for _, words in stored.values()], tuple(stored[key][0] for key in keys)
