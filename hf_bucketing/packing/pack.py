"""Make packs of latents, timesteps and texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..devices import to_device
from ..errors import PackingError
from .audio import Audio
from .batch import PackedBatch, has_latent_size, token_timesteps
from .context import exact_timesteps
from .family import Family, Transformer
from .layout import PackedLayout
from .names import Backend, Grid
from .strips import by_strip, to_strips, token_grid
from .texts import apply_text_mask, deduplicate
from .token_drop import Seed, TokenDrop


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A transformer's packing, as [`enable_packing`][hf_bucketing.models.enable_packing] returns it."""

    transformer: Transformer
    family: Family
    strip_length: int
    backend: Backend
    base_size: Grid | None = None

    @property
    def model_name(self) -> str:
        """The transformer's class, for messages."""
        return type(self.transformer).__name__

    @property
    def processes(self) -> int:
        """Processes that share a pack, each with a part of its strips (context parallelism)."""
        config = self.transformer._parallel_config
        return 1 if config is None else int(config.context_parallel_config.ulysses_degree)

    def pack(
        self,
        latents: Sequence[torch.Tensor],
        *,
        timesteps: torch.Tensor | Sequence[torch.Tensor],
        text: Sequence[torch.Tensor] | torch.Tensor,
        references: Sequence[Sequence[torch.Tensor]] | None = None,
        text_mask: torch.Tensor | None = None,
        conditioning: Mapping[str, torch.Tensor | Sequence[torch.Tensor]] | None = None,
        audio: Audio | None = None,
        token_drop: TokenDrop | None = None,
        seeds: Sequence[Seed] | None = None,
        pad_to: int | None = None,
        pad_text_to: int | None = None,
        padded: bool = False,
    ) -> PackedBatch:
        """Pack samples of any sizes.

        Args:
            latents (sequence of `(channels, frames, height, width)`): The samples, on one device and of one dtype.
            timesteps (`torch.Tensor` of shape `(n,)`, or sequence of `torch.Tensor`): One per sample, integers or at
                least `float32`: half precision rounds 999 to 1000. A sequence holds a tensor per sample, with one
                timestep per token, `(t·h·w,)`, or per frame of its token grid, `(t,)`, as for a clean first frame;
                for models that embed several timesteps per sample (`timesteps_per` of the family).
            text (sequence of `(length, text_dim)`, or `torch.Tensor` of shape `(n, length, text_dim)`): The samples'
                texts. The model attends to every token, padding included: leave out what it must not see. One tensor
                given for several samples is stored once.
            references (sequence of sequences of `(channels, f, h, w)`, *optional*): The references of each sample, any
                number of any sizes: clean latents whose tokens follow the sample's own, for edit and in-context
                models. Models with a timestep per token get 0 for them; others decide themselves. Where references
                stand within the text, `text_mask` is 2 for the text token that each follows.
            text_mask (`torch.Tensor` of shape `(n, length)`, *optional*): Zero for the padding in `text`, which is
                then treated as the family's pipeline treats it (`padding` of [`TextTokens`]): omitted (`"masked"`),
                attended to as zeros (`"keep_padding"`, such as Wan), or unchanged (`"encoded_padding"`, such as SD3).
                Masks, here and in `conditioning`, make lengths: give them on the CPU, as reading them from a device
                waits for it.
            conditioning (mapping of `str` to `torch.Tensor` of shape `(n, …)`, *optional*): Further per-sample inputs
                of the transformer's forward, under its names; exactly those that the model needs. Those of a latent's
                size, such as a control video, are a sequence of `(channels, frames, height, width)`, as are those of
                sizes of their own (`joined_frames` of the family). The others may lie on the CPU: the model gets them
                on the device of the latents.
            audio ([`Audio`], *optional*): Audio of the samples, for models that generate it with video; its texts have
                the same `text_mask`.
            token_drop ([`TokenDrop`], *optional*): Rule by which tokens are dropped from the pack; in training only.
            seeds (sequence of `int`, or of tuples of them, *optional*): Seeds of token drop, one per sample.
            pad_to (`int`, *optional*): Strips of the pack, reached by padding, so that all packs have one shape and
                `torch.compile` makes one graph of them.
            pad_text_to (`int`, *optional*): Text tokens of the pack, likewise. Where strips carry the text, the text
                slots of all strips: a multiple of `pad_to`.
            padded (`bool`): Whether strips are as long as the longest sample, in place of `strip_length`: a stack of
                samples that are padded to one length, whose padding attention does not see. Where the model has
                positions for shorter strips alone, samples take as few of equal length as it allows.

        Returns:
            [`PackedBatch`].

        Raises:
            PackingError: If counts, channels, dtypes or devices differ, a latent does not divide into patches, a
                sample exceeds the model's positions, the model takes no references or fewer, tokens cannot be
                dropped, or the pack exceeds its fixed shape.
        """
        conditions = self._check_conditioning({} if conditioning is None else conditioning, count=len(latents))
        patch = self.family.patch(self.transformer.config)
        texts = apply_text_mask(self.family.text.padding, text, mask=text_mask)
        self._check_timesteps(timesteps, count=len(latents))
        _check_counts(latents, texts, timesteps)
        grids = tuple(token_grid(latent, patch, sample=sample) for sample, latent in enumerate(latents))
        self._check_tensors(latents, texts)
        reference_grids = self._reference_grids(latents, references)
        if audio is not None:
            audio = self._checked_audio(audio.masked(self.family.text.padding, text_mask), tuple(map(len, texts)))
        stored, caption_ids = deduplicate(texts)
        layout = PackedLayout(
            grids=grids,
            shown=reference_grids,
            references_apart=self.family.references_apart,
            reference_places=None
            if reference_grids is None
            else self.family.reference_places(reference_grids, text_mask),
            text_lengths=tuple(map(len, texts)),
            strip_length=self.strip_length,
            processes=self.processes,
            device=latents[0].device,
            added_lengths=self.family.added_lengths(conditions),
            caption_ids=caption_ids if pad_text_to is None else None,
            kept=self._kept(grids, reference_grids, token_drop, seeds, device=latents[0].device),
            audio_lengths=None if audio is None else audio.lengths,
            audio_by_sample=self.family.audio_by_sample,
        )
        self.family.check_layout(self.transformer, layout, stretched=self.base_size is not None)
        layout = self._fitted(layout, padded=padded, pad_to=pad_to, pad_text_to=pad_text_to)
        by_row = reference_grids is None or self.family.timesteps_per == "row"
        if not (isinstance(timesteps, torch.Tensor) and by_row):
            timesteps = _strip_timesteps(timesteps, layout)
        batch = PackedBatch(
            strips=to_strips(latents, patch, layout=layout, references=references),
            timesteps=exact_timesteps(timesteps),
            text=F.pad(torch.cat(texts if layout.caption_ids is None else stored), (0, 0, 0, layout.text_padding)),
            layout=layout,
            patch=patch,
            audio=audio,
        )
        return replace(
            batch, conditioning={name: self._packed(batch, name, values) for name, values in conditions.items()}
        )

    def _fitted(
        self, layout: PackedLayout, *, padded: bool, pad_to: int | None, pad_text_to: int | None
    ) -> PackedLayout:
        """Return a layout with its text fitted, its strips as long as samples are padded to, and a fixed shape."""
        if padded:
            layout = replace(layout, strip_length=self._padded_length(layout))
        layout, pad_text_to = self.family.fit_text(self.transformer, layout, pad_to=pad_to, pad_text_to=pad_text_to)
        return replace(
            layout,
            padding_strips=_padding("strips", layout.num_strips, pad_to),
            text_padding=_padding("text tokens", layout.num_text_tokens, pad_text_to),
        )

    def _padded_length(self, layout: PackedLayout) -> int:
        """Return the tokens of strips of which the longest sample fills one, or as few as positions allow."""
        filled, _ = self.family.fit_text(self.transformer, layout, pad_to=None, pad_text_to=None)
        tokens = -(-max(filled.attended_lengths) // self.processes)  # in each process's part of the strips
        strips = -(-tokens // (self.family.longest_strip(self.transformer) // self.processes))
        length = -(-tokens // strips) * self.processes
        self.family.check(self.transformer, strip_length=length)
        return length

    def _packed(self, batch: PackedBatch, name: str, values: Any) -> torch.Tensor:
        """Return conditioning as [`PackedBatch`] holds it."""
        if name in self.family.joined_frames:
            return torch.cat(list(values), 1)[None]
        packed: torch.Tensor = batch.pack_like(values) if has_latent_size(values) else values
        return packed

    def _check_timesteps(self, timesteps: torch.Tensor | Sequence[torch.Tensor], *, count: int) -> None:
        """Refuse what is neither one timestep per sample nor, for models that take it, some per sample."""
        if isinstance(timesteps, torch.Tensor):
            if timesteps.ndim == 1:
                return
        elif isinstance(timesteps, Sequence) and all(
            torch.is_tensor(levels) and levels.ndim == 1 for levels in timesteps
        ):
            if self.family.timesteps_per != "row":
                return
            raise PackingError(
                f"{self.model_name} embeds one timestep per batch row, so all tokens of a sample have the same one: "
                f"pass a tensor of shape ({count},)."
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
            for what, tensor, first in (("Latent", latent, latents[0]), ("Text", words, texts[0])):
                if (tensor.dtype, tensor.device) != (first.dtype, first.device):
                    raise PackingError(
                        f"{what} {sample} is {tensor.dtype} on {tensor.device}, and {what.lower()} 0 is {first.dtype} "
                        f"on {first.device}; a pack has one dtype on one device."
                    )

    def _checked_audio(self, audio: Audio, text_lengths: Sequence[int]) -> Audio:
        if not self.family.audio_parts:
            raise PackingError(f"{self.model_name} generates no audio beside its video; omit `audio`.")
        if self.processes > 1 and not self.family.shares_audio:
            raise PackingError(
                f"The {self.processes} processes that share this pack have a part of its video each, and no plan by "
                f"which they share the audio of a {self.model_name}; omit `audio`, or context parallelism."
            )
        channels, text_dim = self.family.audio_channels(self.transformer), self.family.audio_text_dim(self.transformer)
        audio.check(text_lengths=text_lengths, channels=channels, text_dim=text_dim)
        return audio

    def _reference_grids(
        self, latents: Sequence[torch.Tensor], references: Sequence[Sequence[torch.Tensor]] | None
    ) -> tuple[tuple[Grid, ...], ...] | None:
        """Return the token grids of the references of each sample; None if there are none."""
        if references is None or not any(map(len, references)):
            return None
        if len(references) != len(latents):
            raise PackingError(
                f"`references` needs a sequence for each of the {len(latents)} samples, empty where one has none; got "
                f"{len(references)}."
            )
        patch, first = self.family.patch(self.transformer.config), latents[0]
        for sample, of_sample in enumerate(references):
            for latent in of_sample:
                if (latent.shape[0], latent.dtype, latent.device) != (first.shape[0], first.dtype, first.device):
                    raise PackingError(
                        f"A reference of sample {sample} has {latent.shape[0]} channels and is {latent.dtype} on "
                        f"{latent.device}; the latents have {first.shape[0]} and are {first.dtype} on {first.device}."
                    )
        return tuple(
            tuple(token_grid(latent, patch, sample=sample, name="Reference of sample") for latent in of_sample)
            for sample, of_sample in enumerate(references)
        )

    def _kept(
        self,
        grids: Sequence[Grid],
        references: Sequence[Sequence[Grid]] | None,
        drop: TokenDrop | None,
        seeds: Sequence[Seed] | None,
        *,
        device: torch.device,
    ) -> tuple[torch.Tensor, ...] | None:
        if drop is None:
            return None
        if not self.transformer.training:
            raise PackingError("Tokens are dropped in training only: call transformer.train(), or omit token_drop.")
        if seeds is None:
            raise PackingError("Token drop draws from the samples' own seeds; pass seeds=, one per sample.")
        shown_tokens = None if references is None else [sum(map(math.prod, others)) for others in references]
        kept = drop.kept(grids, seeds=seeds, shown_tokens=shown_tokens)
        if [len(tokens) for tokens in kept] == [math.prod(grid) for grid in grids]:
            return None
        return tuple(to_device(torch.from_numpy(tokens), device) for tokens in kept)

    def _check_conditioning(self, conditioning: Mapping[str, Any], *, count: int) -> Mapping[str, Any]:
        names = list(self.family.conditioning(self.transformer))
        if not isinstance(conditioning, Mapping) or not all(
            isinstance(values, (torch.Tensor, Sequence)) and all(map(torch.is_tensor, values))
            for values in conditioning.values()
        ):
            raise PackingError(
                f"`conditioning` must be a mapping of names to tensors of {count} rows, here of "
                f"{names or 'nothing'}; got {conditioning!r:.200}."
            )
        got = {name: tuple(getattr(values, "shape", (len(values),))) for name, values in conditioning.items()}
        optional = set(self.family.optional_conditioning)
        if got.keys() - optional != set(names) or any(shape[:1] != (count,) for shape in got.values()):
            hint = " A recipe's `model_inputs` returns it." if set(names) - set(got) else ""
            raise PackingError(
                f"This {self.model_name} needs conditioning {names or 'none'}, each with "
                f"{count} rows; got {got or 'none'}.{hint}"
            )
        return conditioning


def _check_counts(latents: Sequence[Any], texts: Sequence[Any], timesteps: Sequence[Any] | torch.Tensor) -> None:
    if not len(latents) == len(texts) == len(timesteps) or not len(latents):
        raise PackingError(
            f"A pack needs one text and one timestep per latent, got {len(latents)} latents, {len(texts)} texts "
            f"and {len(timesteps)} timesteps."
        )


def _strip_timesteps(timesteps: torch.Tensor | Sequence[torch.Tensor], layout: PackedLayout) -> torch.Tensor:
    """Return timesteps per token of the strips, `(num_strips, strip_length)`."""
    pairs = enumerate(zip(timesteps, layout.sample_grids, strict=True))
    by_token = [token_timesteps(levels, *grids, sample=sample) for sample, (levels, grids) in pairs]
    return by_strip(by_token, layout)


def _padding(what: str, count: int, fixed: int | None) -> int:
    if fixed is not None and fixed < count:
        raise PackingError(
            f"The pack has {count} {what}, more than the {fixed} to pad to; pad to more, or pack fewer samples."
        )
    return 0 if fixed is None else fixed - count
