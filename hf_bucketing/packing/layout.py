"""The layout of a pack: which tokens are whose, as attention, positions, targets and losses need it.

The latents of a pack are cut into strips, and each strip is one batch row of the model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..buckets.sizes import IntOrArray
from ..devices import to_device
from ..errors import PackingError
from .names import Backend, Grid
from .segments import SegmentSpans, Span, as_sizes


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """The strips of a pack: each holds `strip_length` tokens of one sample; the last strip of a sample is padded.

    Args:
        grids (tuple of `(t, h, w)`): Token grid of each sample; at least one.
        shown (tuple of tuples of `(t, h, w)`, *optional*): Token grids of the references of each sample, whose tokens
            follow its own. By default none.
        references_apart (`bool`): Whether the references of a sample attend to themselves alone, all of them together,
            while its own tokens and its text attend to them too.
        reference_places (tuple of tuples of `int`, *optional*): Text tokens of each sample that precede each of its
            references, for models in whose sequence references stand within the text.
        text_lengths (tuple of `int`): Text tokens of each sample. The texts follow one another without padding.
        strip_length (`int`): Tokens per strip.
        text_slots (`int`): Text tokens that each strip carries beside its own, for models whose text tokens sit in
            the same sequence; the texts fill the slots of all strips in order. 0 where text lies apart.
        device (`torch.device`): Device of the tensors below.
        added_lengths (tuple of `int`, *optional*): Further tokens of each sample that sit in the sequence with its
            text, such as those of an image or of a second text encoder. By default none.
        caption_ids (tuple of `int`, *optional*): The stored text that each sample reads, numbered by first use. By
            default, each sample has a text of its own.
        kept (tuple of `torch.Tensor`, *optional*): The tokens of each sample's own grid that are in the pack, as
            ascending indices. By default, all tokens; those of references always are.
        audio_lengths (tuple of `int`, *optional*): Audio tokens of each sample, which lie apart; 0 where a sample has
            none. By default, the pack has no audio.
        audio_by_sample (`bool`): Whether each strip has a row of audio tokens of its own sample; else the audio of all
            samples is cut evenly into rows.
        padding_strips (`int`): Strips of padding at the end, for packs of one fixed shape.
        text_padding (`int`): Text tokens of padding at the end.
        processes (`int`): Processes that share the strips (context parallelism), each with an equal part of their
            tokens and text slots.
        multiple_of (`int`): Multiple to which the model itself fills up each sample's tokens, and its text tokens,
            with learned tokens, which take part in attention; 1 for models that do not. Lengths below count them only
            where they say so.

    Raises:
        PackingError: If there is no sample, a count differs, or a length is impossible.

    Example:
        A sample of 2×3 tokens and one of a single token, in strips of four:

        >>> layout = PackedLayout(grids=((1, 2, 3), (1, 1, 1)), text_lengths=(2, 1), strip_length=4)
        >>> layout.segment_ids.tolist()
        [0, 0, 0, 0, 0, 0, -1, -1, 1, -1, -1, -1]
        >>> layout.strip_segments.tolist()
        [0, 0, 1]
    """

    grids: tuple[Grid, ...]
    text_lengths: tuple[int, ...]
    strip_length: int
    shown: tuple[tuple[Grid, ...], ...] | None = None
    references_apart: bool = False
    reference_places: tuple[tuple[int, ...], ...] | None = None
    text_slots: int = 0
    device: torch.device | str = "cpu"
    added_lengths: tuple[int, ...] | None = None
    caption_ids: tuple[int, ...] | None = None
    kept: tuple[torch.Tensor, ...] | None = field(default=None, compare=False)
    audio_lengths: tuple[int, ...] | None = None
    audio_by_sample: bool = False
    padding_strips: int = 0
    text_padding: int = 0
    processes: int = 1
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if not self.grids or self.strip_length < 1 or self.text_slots < 0:
            raise PackingError(
                f"A pack needs a sample, a strip_length of at least 1 and text_slots of at least 0, got "
                f"{len(self.grids)} samples, {self.strip_length} and {self.text_slots}."
            )
        if len(self.text_lengths) != len(self.grids):
            raise PackingError(f"A pack of {len(self.grids)} samples needs as many texts, got {self.text_lengths}.")
        for name in ("shown", "reference_places", "caption_ids", "added_lengths", "audio_lengths"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.grids):
                raise PackingError(f"A pack of {len(self.grids)} samples needs as many {name}: {values}.")
        grids = list(itertools.chain.from_iterable(self.sample_grids))
        if min(map(min, grids)) < 1 or min(self.text_lengths) < 0:
            raise PackingError(f"Grids must be at least 1 and text lengths 0: {grids}, {self.text_lengths}.")
        if self.text_index is not None and self.text_padding:
            raise PackingError("Texts that samples share (caption_ids) are not padded: use text_padding without them.")
        if min(self.padding_strips, self.text_padding) < 0:
            raise PackingError(
                f"Padding must be at least 0: {self.padding_strips} strips, {self.text_padding} text tokens."
            )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.grids)

    @cached_property
    def sample_grids(self) -> tuple[tuple[Grid, ...], ...]:
        """Token grids of each sample: its own, then those of its references."""
        references = self.shown or ((),) * len(self)
        return tuple((grid, *others) for grid, others in zip(self.grids, references, strict=True))

    @cached_property
    def own_lengths(self) -> tuple[int, ...]:
        """Tokens of each sample's own grid, without padding: those that are generated and learned."""
        return tuple(map(math.prod, self.grids)) if self.kept is None else tuple(map(len, self.kept))

    @cached_property
    def shown_lengths(self) -> tuple[int, ...]:
        """Tokens of the references of each sample."""
        return tuple(sum(map(math.prod, others)) for _, *others in self.sample_grids)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample with those of its references, without padding."""
        return tuple(map(sum, zip(self.own_lengths, self.shown_lengths, strict=True)))

    @cached_property
    def attended_lengths(self) -> tuple[int, ...]:
        """Tokens of each sample with those that the model fills it up with (`multiple_of`)."""
        return tuple(self._filled_up(length) for length in self.lengths)

    @cached_property
    def attended_text_lengths(self) -> tuple[int, ...]:
        """Text tokens of each sample with those that the model fills it up with (`multiple_of`)."""
        return tuple(self._filled_up(length) for length in self.joint_text_lengths)

    def _filled_up(self, length: int) -> int:
        return _ceil_div(length, self.multiple_of) * self.multiple_of

    @cached_property
    def strips_per_sample(self) -> tuple[int, ...]:
        """Strips of each sample."""
        return tuple(_ceil_div(length, self.strip_length) for length in self.attended_lengths)

    @cached_property
    def joint_text_lengths(self) -> tuple[int, ...]:
        """Text tokens of each sample where text sits in the same sequence, those of `added_lengths` included."""
        added = self.added_lengths or (0,) * len(self)
        return tuple(map(sum, zip(self.text_lengths, added, strict=True)))

    @cached_property
    def text_strips_per_sample(self) -> tuple[int, ...]:
        """Strips whose text slots hold text of each sample."""
        return tuple(_ceil_div(text, self.text_slots) for text in self.attended_text_lengths)

    @property
    def num_strips(self) -> int:
        """Strips of the pack, those of padding included."""
        return sum(self.strips_per_sample) + self.padding_strips

    @property
    def row_sizes(self) -> tuple[int, int]:
        """Text slots and tokens of a batch row: of a strip, or of a process's part of it."""
        return self._slots_of_row.shape[0], self.strip_length // self.processes

    @cached_property
    def _slots_of_row(self) -> torch.Tensor:
        return as_sizes(self.text_slots // self.processes)

    @cached_property
    def holds_text(self) -> bool:
        """Whether strips carry text slots."""
        return self.text_slots > 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the pack, padding included: `num_strips · strip_length`."""
        return self.num_strips * self.strip_length

    @cached_property
    def num_text_tokens(self) -> int:
        """Text tokens of all samples, padding included."""
        return sum(self.text_lengths) + self.text_padding

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Start and stop of the real tokens of each sample in the pack."""
        return self._spans_of(self.lengths)

    @cached_property
    def own_spans(self) -> tuple[Span, ...]:
        """Start and stop of the tokens of each sample's own grid in the pack."""
        return self._spans_of(self.own_lengths)

    @cached_property
    def attended_spans(self) -> tuple[Span, ...]:
        """Start and stop of the tokens of each sample with those that the model fills it up with."""
        return self._spans_of(self.attended_lengths)

    def _spans_of(self, lengths: tuple[int, ...]) -> tuple[Span, ...]:
        starts = _starts([strips * self.strip_length for strips in self.strips_per_sample])
        return tuple((start, start + length) for start, length in zip(starts, lengths, strict=True))

    @cached_property
    def text_spans(self) -> tuple[Span, ...]:
        """Start and stop of the text tokens of each sample."""
        return tuple(itertools.pairwise([0, *itertools.accumulate(self.text_lengths)]))

    @cached_property
    def self_segments(self) -> SegmentSpans:
        """Attention of each sample's tokens to each other."""
        return self.segments_within(self.attended_spans, self.num_tokens)

    def segments_within(self, spans: Sequence[Span], num_tokens: int) -> SegmentSpans:
        """Return the attention of the tokens of each sample's span, which begins with its own, to each other.

        Where references attend to themselves alone, a span is up to three segments: what precedes them, they, and what
        follows them.

        Example:
            A sample of three tokens, a reference of two and a text of one, and a sample of a single token:

            >>> layout = PackedLayout(
            ...     grids=((1, 1, 3), (1, 1, 1)),
            ...     shown=(((1, 1, 2),), ()),
            ...     references_apart=True,
            ...     text_lengths=(1, 0),
            ...     strip_length=4,
            ... )
            >>> segments = layout.segments_within([(0, 6), (6, 7)], 7)
            >>> segments.queries, segments.keys
            (((0, 3), (3, 5), (5, 6), (6, 7)), ((0, 6), (3, 5), (0, 6), (6, 7)))
        """
        if not self.references_apart or self.shown is None:
            return SegmentSpans.within(spans, num_tokens)
        pairs: list[tuple[Span, Span]] = []
        for (start, stop), count, reference_count in zip(spans, self.own_lengths, self.shown_lengths, strict=True):
            first, last = start + count, start + count + reference_count
            apart = [((start, first), (start, stop)), ((first, last), (first, last)), ((last, stop), (start, stop))]
            pairs += apart if reference_count else [((start, stop), (start, stop))]
        queries, keys = zip(*(pair for pair in pairs if pair[0][0] < pair[0][1]), strict=True)
        return SegmentSpans(queries=queries, keys=keys, num_queries=num_tokens, num_keys=num_tokens)

    @cached_property
    def cross_segments(self) -> SegmentSpans:
        """Attention of each sample's tokens to its own text."""
        return self._segments_to(self.text_spans, self.num_text_tokens)

    def even_segments(self, num_keys: int) -> SegmentSpans:
        """Return the attention of each sample's tokens to an equal share of `num_keys` keys, such as image tokens."""

        def make() -> SegmentSpans:
            share = num_keys // len(self)
            keys = tuple((sample * share, (sample + 1) * share) for sample in range(len(self)))
            return self._segments_to(keys, num_keys)

        return self.self_segments.made(("even", num_keys), make)  # kept for the next layer

    def _segments_to(self, keys: tuple[Span, ...], num_keys: int) -> SegmentSpans:
        return SegmentSpans(queries=self.spans, keys=keys, num_queries=self.num_tokens, num_keys=num_keys)

    @cached_property
    def by_frame(self) -> FrameLayout:
        """Attention inside frames and over frames, for models that alternate between the two."""
        return FrameLayout.of(self)

    @cached_property
    def joint(self) -> JointLayout:
        """Each sample's tokens and its text tokens as one sequence, where strips carry both."""
        return JointLayout.of(self)

    @cached_property
    def _stored_lengths(self) -> tuple[int, ...]:
        captions = range(len(self)) if self.caption_ids is None else self.caption_ids
        return tuple(dict(zip(captions, self.text_lengths, strict=True)).values())

    @cached_property
    def num_stored_text_tokens(self) -> int:
        """Text tokens that the pack holds: a shared caption counts once, padding is included."""
        return sum(self._stored_lengths) + self.text_padding

    @cached_property
    def text_index(self) -> torch.Tensor | None:
        """Index of each sample's text tokens among the stored ones, `(num_text_tokens,)`; None if in order."""
        if self.caption_ids is None or len(self._stored_lengths) == len(self):
            return None
        starts = _starts(self._stored_lengths)
        pieces = zip(self.caption_ids, self.text_lengths, strict=True)
        index = torch.cat([torch.arange(starts[caption], starts[caption] + length) for caption, length in pieces])
        return to_device(index, self.device)

    @cached_property
    def text_order(self) -> torch.Tensor:
        """As [`text_index`], also where the texts lie in order; `(num_text_tokens,)`."""
        index = self.text_index
        order = to_device(torch.arange(self.num_text_tokens), self.device) if index is None else index
        torch._dynamo.maybe_mark_dynamic(order, 0)
        return order

    @cached_property
    def strip_segments(self) -> torch.Tensor:
        """The sample that each strip belongs to, −1 for padding; `int64`, shape `(num_strips,)`."""
        ids = _repeat([*range(len(self)), -1], [*self.strips_per_sample, self.padding_strips])
        return to_device(ids, self.device)

    @cached_property
    def segment_ids(self) -> torch.Tensor:
        """The sample that each token belongs to, −1 for padding; `int64`, shape `(num_tokens,)`."""
        return self._ids_of(self.spans)

    @cached_property
    def own_ids(self) -> torch.Tensor:
        """The sample whose own grid each token belongs to, −1 for references and padding; shape `(num_tokens,)`."""
        return self._ids_of(self.own_spans)

    @cached_property
    def own_tokens_by_strip(self) -> tuple[int, ...]:
        """Tokens of each strip that belong to its sample's own grid; none in strips of padding."""
        starts = [
            range(0, strips * self.strip_length, self.strip_length)
            for strips in (*self.strips_per_sample, self.padding_strips)
        ]
        pairs = zip(starts, (*self.own_lengths, 0), strict=True)
        return tuple(min(max(count - start, 0), self.strip_length) for strips, count in pairs for start in strips)

    def _ids_of(self, spans: Sequence[Span]) -> torch.Tensor:
        ids = torch.full((self.num_tokens,), -1)
        for sample, span in enumerate(spans):
            ids[slice(*span)] = sample
        return to_device(ids, self.device)

    @cached_property
    def text_segment_ids(self) -> torch.Tensor:
        """The sample that each text token belongs to, −1 for padding; `int64`, shape `(num_text_tokens,)`."""
        ids = _repeat([*range(len(self)), -1], [*self.text_lengths, self.text_padding])
        return to_device(ids, self.device)

    def prepare(self, backend: Backend, segments: Iterable[SegmentSpans]) -> None:
        """Make what attention derives from this layout on its device; compiled models need it made beforehand.

        Args:
            backend (`str`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
            segments (iterable of [`SegmentSpans`]): Those of this layout that the processors of the model read.
        """
        from .attention.dispatch import prepare_segments

        for spans in {id(spans): spans for spans in segments}.values():
            prepare_segments(spans, backend, torch.device(self.device))
        _ = (
            self.text_index,
            self.text_order,
            self._slots_of_row,
            self.holds_text,
            self.num_text_tokens,
            self.num_stored_text_tokens,
            self.own_ids,
        )

    def self_attention_mask(self) -> torch.Tensor:
        """Return which tokens attend to which: `bool`, `(num_tokens, num_tokens)`; padding attends to nothing."""
        mask, is_sample = self._mask(self.segment_ids), self.own_ids >= 0
        return mask & (is_sample[:, None] | ~is_sample) if self.references_apart else mask

    def cross_attention_mask(self) -> torch.Tensor:
        """Return which tokens attend to which text tokens: `bool`, `(num_tokens, num_text_tokens)`."""
        return self._mask(self.text_segment_ids)

    def _mask(self, key_ids: torch.Tensor) -> torch.Tensor:
        ids = self.segment_ids
        return (ids[:, None] == key_ids[None]) & (ids >= 0)[:, None]


@dataclass(frozen=True, kw_only=True)
class FrameLayout:
    """Attention inside frames and over frames; `layout.by_frame` of a [`PackedLayout`].

    A spatial position is one row and column; its tokens are those of all frames of a sample.

    Attributes:
        frames ([`SegmentSpans`]): Attention of the tokens of each frame to each other.
        spatial_positions ([`SegmentSpans`]): Attention of the tokens of each spatial position to each other, over
            tokens sorted by `order`.
        order (`torch.Tensor` of shape `(num_tokens,)`): The tokens of the pack with each sample's frames innermost.
        inverse (`torch.Tensor` of shape `(num_tokens,)`): The inverse permutation of `order`.
    """

    frames: SegmentSpans
    spatial_positions: SegmentSpans
    order: torch.Tensor
    inverse: torch.Tensor

    @classmethod
    def of(cls, layout: PackedLayout) -> FrameLayout:
        """Return the frames of a pack from which no token was dropped.

        Example:
            Two frames of three tokens:

            >>> by_frame = FrameLayout.of(PackedLayout(grids=((2, 1, 3),), text_lengths=(1,), strip_length=6))
            >>> by_frame.frames.queries, by_frame.spatial_positions.queries
            (((0, 3), (3, 6)), ((0, 2), (2, 4), (4, 6)))
            >>> by_frame.order.tolist()
            [0, 3, 1, 4, 2, 5]
        """
        order = torch.arange(layout.num_tokens)
        for (start, stop), (t, h, w) in zip(layout.spans, layout.grids, strict=True):
            order[start:stop] = order[start:stop].view(t, h * w).t().flatten()
        return cls(
            frames=_cut_samples(layout, [h * w for _, h, w in layout.grids]),
            spatial_positions=_cut_samples(layout, [t for t, _, _ in layout.grids]),
            order=to_device(order, layout.device),
            inverse=to_device(order.argsort(), layout.device),
        )


@dataclass(frozen=True, kw_only=True)
class JointLayout:
    """Each sample's tokens and its text tokens as one sequence; `layout.joint` of a [`PackedLayout`].

    Below, `entries` counts the tokens and text slots of all strips: `strips · (strip_length + text_slots)`.

    Attributes:
        shape (`torch.Tensor` of shape `(strips, text_slots, 0)`): Strips of the pack, and text tokens of each, see
            [`as_sizes`].
        sizes (two tuples of `int`): Lengths of each sample's tokens and of the padding after them, in turn; the same
            of its text and of empty text slots.
        order (`torch.Tensor` of shape `(entries,)`): For each entry of the sequence, its index among the tokens of all
            strips followed by their text slots. Padding comes last.
        inverse (`torch.Tensor` of shape `(entries,)`): The inverse permutation of `order`.
        segments ([`SegmentSpans`]): Attention of each sample's part of the sequence to itself, see `references_apart`
            of [`PackedLayout`].
        text_segments ([`SegmentSpans`]): Attention of each sample's text to itself, over the text slots of all strips.
        token_to_text ([`SegmentSpans`]): Attention of each sample's tokens to its text, over the same.
        text_source (`torch.Tensor` of shape `(num_text_tokens,)`, *optional*): Index of each sample's text tokens
            among the stored ones; None where they lie in order.
        text_target (`torch.Tensor` of shape `(num_text_tokens,)`): The text slots of each sample's text tokens.
        first_strips (`torch.Tensor` of shape `(n,)`): The first strip of each sample.
        modulated_as (`torch.Tensor` of shape `(strips,)`): For the text of each strip, a strip with tokens of the same
            sample.
        aligned (`bool`): Whether all strips happen to carry text of their own sample, as in a pack of one.
    """

    shape: torch.Tensor
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    order: torch.Tensor
    inverse: torch.Tensor
    segments: SegmentSpans
    text_segments: SegmentSpans
    token_to_text: SegmentSpans
    text_source: torch.Tensor | None
    text_target: torch.Tensor
    first_strips: torch.Tensor
    modulated_as: torch.Tensor
    aligned: bool

    @classmethod
    def of(cls, layout: PackedLayout) -> JointLayout:
        """Return where the tokens of joint attention lie in a pack.

        Raises:
            PackingError: If the layout's strips carry no text, or have too few slots for it.
        """
        if not layout.text_slots:
            raise PackingError("The strips of this layout carry no text; make one with text_slots of at least 1.")
        strips, slots = layout.num_strips, layout.text_slots
        firsts, counts = _starts(layout.strips_per_sample), layout.text_strips_per_sample
        if sum(counts) > strips:
            raise PackingError(
                f"The texts fill {sum(counts)} strips of {slots} text slots, and the pack has {strips} strips; "
                "use more slots (pad_text_to), or pack fewer samples."
            )
        text_firsts, samples = _starts(counts), np.arange(len(layout))
        of_text = np.repeat(samples, counts)
        aligned = np.array_equal(of_text, np.repeat(samples, layout.strips_per_sample)[: len(of_text)])
        modulated = np.repeat([*firsts, 0], [*counts, strips - sum(counts)])
        starts = zip(text_firsts, layout.attended_text_lengths, strict=True)
        text_spans = tuple((first * slots, first * slots + length) for first, length in starts)
        pieces = [
            np.concatenate([np.arange(*span), layout.num_tokens + np.arange(*text_span)])
            for span, text_span in zip(layout.attended_spans, text_spans, strict=True)
        ]
        spans = tuple(itertools.pairwise([0, *itertools.accumulate(map(len, pieces))]))
        entries, real = strips * (layout.strip_length + slots), np.concatenate(pieces)
        texts = zip(text_spans, layout.joint_text_lengths, strict=True)
        targets = [np.arange(start, start + length) for (start, _), length in texts]
        order = np.concatenate([real, np.setdiff1d(np.arange(entries), real)])

        def on_device(index: npt.NDArray[np.int64]) -> torch.Tensor:
            moved = to_device(torch.from_numpy(index), layout.device)
            torch._dynamo.maybe_mark_dynamic(moved, 0)
            return moved

        return cls(
            shape=as_sizes(strips, slots),
            sizes=(_split_sizes(layout.attended_spans, layout.num_tokens), _split_sizes(text_spans, strips * slots)),
            order=on_device(order),
            inverse=on_device(np.argsort(order)),
            segments=layout.segments_within(spans, entries),
            text_segments=SegmentSpans.within(text_spans, strips * slots),
            token_to_text=SegmentSpans(
                queries=layout.attended_spans,
                keys=text_spans,
                num_queries=layout.num_tokens,
                num_keys=strips * slots,
            ),
            text_source=layout.text_index,
            text_target=on_device(np.concatenate(targets)),
            first_strips=on_device(np.array(firsts)),
            modulated_as=on_device(modulated),
            aligned=aligned,
        )

    @property
    def strips(self) -> int:
        """Strips of the pack."""
        return self.shape.shape[0]

    @property
    def text_slots(self) -> int:
        """Text tokens that each strip carries."""
        return self.shape.shape[1]

    def gather(self, tokens: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Gather tokens `(strips, strip_length, …)` and text slots `(strips, text_slots, …)` into `(entries, …)`."""
        return self.join(tokens.flatten(0, 1), text.flatten(0, 1))

    def join(self, *sides: torch.Tensor) -> torch.Tensor:
        """Join the tokens of all strips `(num_tokens, …)` and their text slots, `(text tokens, …)`; see [`gather`]."""
        if torch.compiler.is_compiling():  # a graph of the sizes would serve no other pack
            return permute(torch.cat(sides), self.order, self.inverse)
        pieces = [_split(side, sizes) for side, sizes in zip(sides, self.sizes, strict=True)]
        real = itertools.chain.from_iterable(zip(*(piece[::2] for piece in pieces), strict=True))
        return _concatenate([*real, *(padding for piece in pieces for padding in piece[1::2])])

    def scatter(self, sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter a sequence back into tokens and text slots of strips: the inverse of [`gather`]."""
        tokens, text = (side.unflatten(0, (self.strips, -1)) for side in self.separate(sequence))
        return tokens, text

    def separate(self, sequence: torch.Tensor) -> Sequence[torch.Tensor]:
        """Separate a sequence into the tokens of all strips and their text slots: the inverse of [`join`]."""
        if torch.compiler.is_compiling():
            words = self.strips * self.text_slots
            return permute(sequence, self.inverse, self.order).split([len(sequence) - words, words])
        real = itertools.chain.from_iterable(zip(*(sizes[::2] for sizes in self.sizes), strict=True))
        pieces = _split(sequence, [*real, *(padding for sizes in self.sizes for padding in sizes[1::2])])
        count = len(self.sizes[0]) // 2
        parts = [(pieces[side : 2 * count : 2], pieces[(side + 2) * count :]) for side in range(2)]
        return [_concatenate([*itertools.chain.from_iterable(zip(*pair, strict=False))]) for pair in parts]

    def gather_tables(self, tokens: Sequence[torch.Tensor], text: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Gather rotary tables of tokens and of text slots, once for the layers that are given the same."""
        if torch.compiler.is_compiling():
            return [self.gather(*pair) for pair in zip(tokens, text, strict=True)]
        tables = (*tokens, *text)
        if not self._gathered or any(one is not other for one, other in zip(tables, self._gathered[0], strict=False)):
            self._gathered[:] = [tables, [self.gather(*pair) for pair in zip(tokens, text, strict=True)]]
        return self._gathered[1]

    @cached_property
    def _gathered(self) -> list[Sequence[torch.Tensor]]:
        return []

    def text_strips(self) -> torch.Tensor | None:
        """Return `modulated_as`, or None where it makes no difference; a compiled model gets one graph for both."""
        return None if not torch.compiler.is_compiling() and self.aligned else self.modulated_as

    def text_by_strip(self, text: torch.Tensor) -> torch.Tensor:
        """Put a pack's stored texts into the strips of the samples that read them: `(strips, text_slots, …)`."""
        return self.fill_slots(text if self.text_source is None else text.index_select(0, self.text_source))

    def fill_slots(self, texts: torch.Tensor) -> torch.Tensor:
        """Put the samples' text tokens, one sample after another, into the text slots; zeros as padding."""
        slots = texts.new_zeros(self.strips * self.text_slots, *texts.shape[1:])
        return slots.index_copy(0, self.text_target, texts).unflatten(0, (self.strips, -1))

    def read_slots(self, text: torch.Tensor) -> torch.Tensor:
        """Take the samples' text tokens out of `(strips, text_slots, …)`: the inverse of [`fill_slots`]."""
        return text.flatten(0, 1).index_select(0, self.text_target)


def permute(values: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return `values[order]` for a permutation; its backward gathers too, where that of an index would add."""
    permuted: torch.Tensor = _Permute.apply(values, order, inverse)
    return permuted


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order, inverse)
        return values.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return permute(gradient, inverse, order), None, None


def _split(values: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor | None]:
    """Split values into pieces, those of no length None: each piece of a split gets a gradient, empty ones zeros."""
    filled = [size for size in sizes if size]
    pieces = iter(values.split(filled) if len(filled) > 1 else [values])
    return [next(pieces) if size else None for size in sizes]


def _concatenate(pieces: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Concatenate pieces, of which at least one has a length; a single one is not copied."""
    filled = [piece for piece in pieces if piece is not None]
    return filled[0] if len(filled) == 1 else torch.cat(filled)


def _split_sizes(spans: Sequence[Span], total: int) -> tuple[int, ...]:
    """Return the length of each span and of what follows it up to the next one, in turn; the first starts at 0."""
    bounds = [*itertools.chain.from_iterable(spans), total]
    return tuple(stop - start for start, stop in itertools.pairwise(bounds))


def best_text_slots(layout: PackedLayout) -> int:
    """Return the smallest number of text slots per strip that holds all texts of a pack.

    All strips have the same number. The text of a small image fills the slots of many strips, most of them with tokens
    of other samples.

    Example:
        One token with a text of 12 beside a sample of 40 tokens with the same text, in eleven strips of four. With two
        slots the texts would fill twelve strips; with three they fill eight:

        >>> best_text_slots(PackedLayout(grids=((1, 1, 1), (1, 5, 8)), text_lengths=(12, 12), strip_length=4))
        3
    """
    lengths = layout.attended_text_lengths
    slots = np.arange(1, max(1, *lengths) + 1)
    for_text = _ceil_div(np.array(lengths), slots[:, None])
    return int(slots[(for_text.sum(1) <= sum(layout.strips_per_sample)).argmax()])


def _cut_samples(layout: PackedLayout, lengths: Sequence[int]) -> SegmentSpans:
    """Cut the tokens of each sample into segments of its entry in `lengths`, which attend to themselves."""
    spans = [
        (first, first + length)
        for (start, stop), length in zip(layout.spans, lengths, strict=True)
        for first in range(start, stop, length)
    ]
    return SegmentSpans.within(spans, layout.num_tokens)


def _ceil_div(count: IntOrArray, size: IntOrArray | int) -> IntOrArray:
    return -(-count // size)


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)][:-1]


def _repeat(values: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values)).repeat_interleave(torch.tensor(list(counts)))
