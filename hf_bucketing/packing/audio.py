"""Audio of a pack: tokens beside the strips, which a model runs through layers of its own, or among all others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ..devices import to_device
from ..errors import PackingError
from .layout import PackedLayout
from .segments import SegmentSpans, Span
from .texts import TextRule, apply_text_mask


@dataclass(frozen=True, kw_only=True)
class Audio:
    """Audio of the samples of a pack, for models that generate it together with video.

    Attributes:
        latents (sequence of `(tokens, channels)`): One per sample, with no tokens where a sample has no audio. The
            video of such a sample attends to none, and no audio is predicted of it.
        timesteps (`torch.Tensor` of shape `(n,)`): Timestep of each sample's audio; 0 for audio that is shown clean.
        video_timesteps (`torch.Tensor` of shape `(n,)`): Timestep of each sample's video, whatever its tokens have,
            by which models modulate the attention of audio to it.
        text (sequence of `(length, text_dim)`, or `torch.Tensor` of shape `(n, length, text_dim)`, *optional*): The
            samples' texts as audio attends to them, as long as those of the video; None for models of which audio
            attends to the text of its video.
    """

    latents: Sequence[torch.Tensor]
    timesteps: torch.Tensor
    video_timesteps: torch.Tensor
    text: Sequence[torch.Tensor] | torch.Tensor | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample."""
        return tuple(map(len, self.latents))

    def select(self, sample: int) -> Audio:
        """Return the audio of one sample."""
        some = slice(sample, sample + 1)
        return Audio(
            latents=self.latents[some],
            timesteps=self.timesteps[some],
            video_timesteps=self.video_timesteps[some],
            text=None if self.text is None else self.text[some],
        )

    def masked(self, rule: TextRule, mask: torch.Tensor | None) -> Audio:
        """Return this audio with texts whose padding, where `mask` is zero, is as the pipeline has it."""
        return self if self.text is None else replace(self, text=apply_text_mask(rule, self.text, mask=mask))

    def check(self, *, text_lengths: Sequence[int], channels: int, text_dim: int) -> None:
        """Raise PackingError if counts, channels or lengths do not fit a pack of samples with these texts.

        A `text_dim` of 0 stands for models of which audio attends to the text of its video.
        """
        if (self.text is None) != (text_dim == 0):
            raise PackingError(
                "The audio of this model attends to the text of its video; omit `text`."
                if text_dim == 0
                else "The audio of this model attends to a text of its own; give `text`."
            )
        texts = [] if self.text is None else [self.text]
        counts = [len(values) for values in (self.latents, self.timesteps, self.video_timesteps, *texts)]
        if set(counts) != {len(text_lengths)}:
            raise PackingError(
                f"A pack of {len(text_lengths)} samples needs as many audios, timesteps of audio and of video, and "
                f"texts for audio; got {counts}."
            )
        for sample, latent in enumerate(self.latents):
            if latent.ndim != 2 or latent.shape[1] != channels:
                raise PackingError(
                    f"The audio of sample {sample} has shape {tuple(latent.shape)}; expected (tokens, {channels})."
                )
        for sample, words in enumerate(() if self.text is None else self.text):
            length = text_lengths[sample]
            if tuple(words.shape) != (length, text_dim):
                raise PackingError(
                    f"The text for the audio of sample {sample} has shape {tuple(words.shape)}; expected "
                    f"({length}, {text_dim}), as long as the text for its video."
                )


@dataclass(frozen=True, kw_only=True)
class AudioLayout:
    """Layout of the audio of a pack, one row per strip.

    The audio of one sample follows that of another and is cut evenly into rows; or it begins in the row of the first
    strip of its sample, and all rows are as long as that of the sample with most audio per strip (`audio_by_sample` of
    [`PackedLayout`]).

    Attributes:
        rows (`int`): Strips of the pack.
        row_length (`int`): Tokens of a row.
        spans (tuple of `(start, stop)`): Where the audio of each sample lies among the tokens of all rows.
        samples (`torch.Tensor` of shape `(rows·row_length,)`): The sample of each token; 0 for padding.
        places (`torch.Tensor` of shape `(tokens,)`): Where the tokens of all samples lie among those of all rows.
        within ([`SegmentSpans`]): Attention of each sample's audio to itself.
        to_text ([`SegmentSpans`]): Attention of each sample's audio to its text.
        to_video ([`SegmentSpans`]): Attention of each sample's audio to its video.
        of_video ([`SegmentSpans`]): Attention of each sample's video to its audio, where it has some.
    """

    rows: int
    row_length: int
    spans: tuple[Span, ...]
    samples: torch.Tensor
    places: torch.Tensor
    within: SegmentSpans
    to_text: SegmentSpans
    to_video: SegmentSpans
    of_video: SegmentSpans

    @classmethod
    def of(cls, layout: PackedLayout) -> AudioLayout | None:
        """Return where the audio of a pack lies, None in packs without; made once per layout.

        Example:
            Two samples of two and four tokens, of which the second has three audio tokens:

            >>> grids, lengths = ((1, 1, 2), (1, 1, 4)), (0, 3)
            >>> layout = PackedLayout(grids=grids, audio_lengths=lengths, text_lengths=(1, 1), strip_length=2)
            >>> audio = AudioLayout.of(layout)
            >>> audio.rows, audio.samples.tolist(), audio.of_video.queries, audio.of_video.keys
            (3, [1, 1, 1], ((2, 6),), ((0, 3),))
            >>> by_sample = AudioLayout.of(replace(layout, audio_by_sample=True))
            >>> by_sample.row_length, by_sample.samples.tolist(), by_sample.spans
            (2, [0, 0, 1, 1, 1, 0], ((0, 0), (2, 5)))
        """
        lengths = layout.audio_lengths
        if lengths is None:
            return None
        return layout.self_segments.made("audio", lambda: cls._made(layout, lengths))

    @classmethod
    def _made(cls, layout: PackedLayout, lengths: tuple[int, ...]) -> AudioLayout:
        rows, counts = layout.num_strips, layout.strips_per_sample
        if layout.audio_by_sample:
            length = max(row_length(*pair) for pair in zip(lengths, counts, strict=True))
            firsts = [length * first for first in itertools.accumulate(counts[:-1], initial=0)]
        else:
            length, firsts = row_length(sum(lengths), rows), [*itertools.accumulate(lengths[:-1], initial=0)]
        spans = tuple((first, first + count) for first, count in zip(firsts, lengths, strict=True))
        num_tokens = rows * length
        texts, num_texts = layout.text_spans, layout.num_text_tokens
        if layout.text_slots:
            texts, num_texts = layout.joint.text_segments.queries, layout.joint.text_segments.num_queries

        def segments(
            queries: tuple[Span, ...], keys: tuple[Span, ...], num_queries: int, num_keys: int
        ) -> SegmentSpans:
            present = [
                (*pair,) for pair, length in zip(zip(queries, keys, strict=True), lengths, strict=True) if length
            ]
            query_spans, key_spans = tuple(pair[0] for pair in present), tuple(pair[1] for pair in present)
            return SegmentSpans(queries=query_spans, keys=key_spans, num_queries=num_queries, num_keys=num_keys)

        places = torch.cat([torch.arange(*span) for span in spans])
        samples = torch.zeros(num_tokens, dtype=torch.long)
        samples[places] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        return cls(
            rows=rows,
            row_length=length,
            spans=spans,
            samples=to_device(samples, layout.device),
            places=to_device(places, layout.device),
            within=segments(spans, spans, num_tokens, num_tokens),
            to_text=segments(spans, texts, num_tokens, num_texts),
            to_video=segments(spans, layout.spans, num_tokens, layout.num_tokens),
            of_video=segments(layout.spans, spans, layout.num_tokens, num_tokens),
        )

    def in_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Lay values of all tokens, one sample after another, into rows: `(rows, row_length, …)`, else zeros."""
        laid = values.new_zeros(self.rows * self.row_length, *values.shape[1:])
        return laid.index_copy(0, self.places, values).unflatten(0, (self.rows, -1))

    def by_sample(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the tokens of each sample, `(tokens, …)`: the inverse of [`in_rows`]."""
        tokens = rows.flatten(0, 1)
        return [tokens[slice(*span)] for span in self.spans]


def segments_of_audio(layout: PackedLayout, part: str) -> list[SegmentSpans]:
    """Return the segments of [`AudioLayout`] of that name; none in packs without audio."""
    audio = AudioLayout.of(layout)
    return [] if audio is None else [getattr(audio, part)]


def row_length(num_tokens: int, rows: int) -> int:
    """Return the tokens of a row where `num_tokens`, or a single one of padding, are cut evenly into rows."""
    return -(-max(1, num_tokens) // rows)


def cut_evenly(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Cut tokens `(num_tokens, …)` evenly into rows, `(rows, length, …)`, with zeros at the end."""
    missing = rows * row_length(len(values), rows) - len(values)
    padding = [0, 0] * (values.ndim - 1)
    return F.pad(values, (*padding, 0, missing)).unflatten(0, (rows, -1))
