"""Where each sample's tokens lie in a pack: the value that attention, positions, targets and losses read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import PackingError
from .attention.dispatch import Backend, prepare_segments
from .segments import SegmentSpans

Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """The strips of a pack: each holds `strip_length` tokens of one sample, the last of a sample padded.

    Args:
        grids (tuple of `(t, h, w)`): Token grid of each sample, at least one.
        text_lengths (tuple of `int`): Text tokens of each sample, one after the other without padding.
        strip_length (`int`): Tokens per strip, which is one batch row of the model.
        text_slots (`int`): Text tokens that each strip carries beside its own, for models whose text tokens sit in
            the same sequence; a sample then has as many strips as its text needs. 0 where text lies apart.
        device (`torch.device`): Where the tensors below live.
        caption_ids (tuple of `int`, *optional*): Which stored text each sample reads, numbered by first use; without
            it, each sample's own.
        kept (tuple of `torch.Tensor`, *optional*): The tokens of each sample that are in the pack, as ascending
            positions in its grid; all of them without it.
        empty_rows (`int`): Strips of padding at the end, for packs of one fixed shape.
        text_padding (`int`): Text tokens of padding at the end.

    Raises:
        PackingError: If there is no sample, a count differs, or a length is impossible.

    Example:
        A sample of 2×3 tokens and one of a single token, in strips of four:

        >>> layout = PackedLayout(grids=((1, 2, 3), (1, 1, 1)), text_lengths=(2, 1), strip_length=4)
        >>> layout.segment_ids.tolist()
        [0, 0, 0, 0, 0, 0, -1, -1, 1, -1, -1, -1]
        >>> layout.row_segments.tolist()
        [0, 0, 1]
    """

    grids: tuple[Grid, ...]
    text_lengths: tuple[int, ...]
    strip_length: int
    text_slots: int = 0
    device: torch.device | str = "cpu"
    caption_ids: tuple[int, ...] | None = None
    kept: tuple[torch.Tensor, ...] | None = field(default=None, compare=False)
    empty_rows: int = 0
    text_padding: int = 0

    def __post_init__(self) -> None:
        if not self.grids or self.strip_length < 1 or self.text_slots < 0:
            raise PackingError(
                f"A pack needs a sample, a strip_length of at least 1 and text_slots of at least 0, got "
                f"{len(self.grids)} samples, {self.strip_length} and {self.text_slots}."
            )
        if len(self.text_lengths) != len(self.grids):
            raise PackingError(f"A pack of {len(self.grids)} samples needs as many texts: {len(self.text_lengths)}.")
        if self.caption_ids is not None and len(self.caption_ids) != len(self.grids):
            raise PackingError(f"A pack of {len(self.grids)} samples needs as many caption_ids: {self.caption_ids}.")
        if min(map(min, self.grids)) < 1 or min(self.text_lengths) < 0:
            raise PackingError(f"Grids must be at least 1 and text lengths 0: {self.grids}, {self.text_lengths}.")
        if self.text_index is not None and self.text_padding:
            raise PackingError("Texts that samples share (caption_ids) are not padded: use text_padding without them.")
        if min(self.empty_rows, self.text_padding) < 0:
            raise PackingError(f"Padding must be at least 0: {self.empty_rows} rows, {self.text_padding} text tokens.")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.grids)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample, without padding."""
        return tuple(map(math.prod, self.grids)) if self.kept is None else tuple(map(len, self.kept))

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Strips of each sample."""
        return tuple(
            max(-(-length // self.strip_length), -(-text // self.text_slots) if self.text_slots else 0)
            for length, text in zip(self.lengths, self.text_lengths, strict=True)
        )

    @property
    def num_rows(self) -> int:
        """Strips of the pack, those of padding included."""
        return sum(self.rows) + self.empty_rows

    @property
    def num_tokens(self) -> int:
        """Tokens of the pack, padding included: rows × strip_length."""
        return self.num_rows * self.strip_length

    @cached_property
    def num_text_tokens(self) -> int:
        """Text tokens of the pack, padding included."""
        return sum(self.text_lengths) + self.text_padding

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where the real tokens of each sample start and stop in the pack."""
        starts = _starts([rows * self.strip_length for rows in self.rows])
        return tuple((start, start + length) for start, length in zip(starts, self.lengths, strict=True))

    @cached_property
    def text_spans(self) -> tuple[tuple[int, int], ...]:
        """Where the text tokens of each sample start and stop."""
        starts = _starts(self.text_lengths)
        return tuple((start, start + length) for start, length in zip(starts, self.text_lengths, strict=True))

    @cached_property
    def self_segments(self) -> SegmentSpans:
        """Each sample's tokens attend to each other."""
        return SegmentSpans(queries=self.spans, keys=self.spans, num_queries=self.num_tokens, num_keys=self.num_tokens)

    @cached_property
    def cross_segments(self) -> SegmentSpans:
        """Each sample's tokens attend to its own text."""
        return SegmentSpans(
            queries=self.spans, keys=self.text_spans, num_queries=self.num_tokens, num_keys=self.num_text_tokens
        )

    def even_segments(self, num_keys: int) -> SegmentSpans:
        """Each sample's tokens attend to as many keys of its own, such as image tokens; kept for the next layer."""
        if num_keys not in self._even_segments:
            per_sample = num_keys // len(self)
            keys = tuple((sample * per_sample, (sample + 1) * per_sample) for sample in range(len(self)))
            self._even_segments[num_keys] = SegmentSpans(
                queries=self.spans, keys=keys, num_queries=self.num_tokens, num_keys=num_keys
            )
        return self._even_segments[num_keys]

    @cached_property
    def _even_segments(self) -> dict[int, SegmentSpans]:
        return {}

    @cached_property
    def by_frame(self) -> FrameLayout:
        """The frames, and the places in them, for models that attend inside frames and over them in turn."""
        return frame_layout(self)

    @cached_property
    def _stored_lengths(self) -> tuple[int, ...]:
        captions = range(len(self)) if self.caption_ids is None else self.caption_ids
        return tuple(dict(zip(captions, self.text_lengths, strict=True)).values())

    @cached_property
    def num_stored_text_tokens(self) -> int:
        """Text tokens of the pack, those of a shared caption counted once, padding included."""
        return sum(self._stored_lengths) + self.text_padding

    @cached_property
    def text_index(self) -> torch.Tensor | None:
        """Where each sample's text tokens lie among the stored ones; `int64`, `(num_text_tokens,)`; none: in order."""
        if self.caption_ids is None or len(self._stored_lengths) == len(self):
            return None
        starts = _starts(self._stored_lengths)
        pieces = zip(self.caption_ids, self.text_lengths, strict=True)
        return torch.cat([torch.arange(starts[one], starts[one] + length) for one, length in pieces]).to(self.device)

    @cached_property
    def joint(self) -> JointLayout:
        """Each sample's tokens and its text tokens as one sequence, where strips carry both."""
        return joint_layout(self)

    @cached_property
    def row_segments(self) -> torch.Tensor:
        """The sample that each strip belongs to, −1 for padding; `int64`, shape `(rows,)`."""
        return _repeat([*range(len(self)), -1], [*self.rows, self.empty_rows]).to(self.device)

    @cached_property
    def segment_ids(self) -> torch.Tensor:
        """The sample that each token belongs to, −1 for padding; `int64`, shape `(num_tokens,)`."""
        ids = torch.full((self.num_tokens,), -1)
        for sample, (start, stop) in enumerate(self.spans):
            ids[start:stop] = sample
        return ids.to(self.device)

    @cached_property
    def text_segment_ids(self) -> torch.Tensor:
        """The sample that each text token belongs to, −1 for padding; `int64`, shape `(num_text_tokens,)`."""
        return _repeat([*range(len(self)), -1], [*self.text_lengths, self.text_padding]).to(self.device)

    def prepare(self, backend: Backend, *, by_frame: bool = False) -> None:
        """Make what attention derives from this layout on its device; compiled models need it made beforehand.

        Args:
            backend (`str`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
            by_frame (`bool`): Whether tokens attend inside their frame and over the frames, and not to their sample.
        """
        segments = [self.by_frame.frames, self.by_frame.places] if by_frame else [self.self_segments]
        for one in (*segments, self.joint.segments if self.text_slots else self.cross_segments):
            prepare_segments(one, backend, torch.device(self.device))
        _ = self.text_index, self.num_text_tokens, self.num_stored_text_tokens

    def self_attention_mask(self) -> torch.Tensor:
        """Return which tokens attend to which: `bool`, `(num_tokens, num_tokens)`; padding attends to nothing."""
        return self._mask(self.segment_ids)

    def cross_attention_mask(self) -> torch.Tensor:
        """Return which tokens attend to which text tokens: `bool`, `(num_tokens, num_text_tokens)`."""
        return self._mask(self.text_segment_ids)

    def _mask(self, key_ids: torch.Tensor) -> torch.Tensor:
        ids = self.segment_ids
        return (ids[:, None] == key_ids[None]) & (ids >= 0)[:, None]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)][:-1]


def _repeat(values: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values)).repeat_interleave(torch.tensor(list(counts)))


if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True)
class FrameLayout:
    """The frames of a pack, and the places in them; `layout.by_frame` of a [`PackedLayout`].

    Attributes:
        frames ([`SegmentSpans`]): The tokens of each frame attend to each other.
        places ([`SegmentSpans`]): The tokens of one row and column attend to each other over the frames of a sample,
            laid out by `order`.
        order (`torch.Tensor` of shape `(num_tokens,)`): The tokens of the pack with each sample's frames innermost.
        inverse (`torch.Tensor` of shape `(num_tokens,)`): What puts them back.
    """

    frames: SegmentSpans
    places: SegmentSpans
    order: torch.Tensor
    inverse: torch.Tensor


def frame_layout(layout: PackedLayout) -> FrameLayout:
    """Return the frames of a pack of which no token was dropped.

    Example:
        Two frames of three tokens:

        >>> from hf_bucketing.packing import PackedLayout
        >>> by_frame = frame_layout(PackedLayout(grids=((2, 1, 3),), text_lengths=(1,), strip_length=6))
        >>> by_frame.frames.queries, by_frame.places.queries
        (((0, 3), (3, 6)), ((0, 2), (2, 4), (4, 6)))
        >>> by_frame.order.tolist()
        [0, 3, 1, 4, 2, 5]
    """
    order = torch.arange(layout.num_tokens)
    for (start, stop), (t, h, w) in zip(layout.spans, layout.grids, strict=True):
        order[start:stop] = order[start:stop].view(t, h * w).t().flatten()
    return FrameLayout(
        frames=_segments(layout, [h * w for _, h, w in layout.grids]),
        places=_segments(layout, [t for t, _, _ in layout.grids]),
        order=order.to(layout.device),
        inverse=order.argsort().to(layout.device),
    )


def _segments(layout: PackedLayout, lengths: Sequence[int]) -> SegmentSpans:
    """Cut the tokens of each sample into segments of its length."""
    spans = tuple(
        (first, first + length)
        for (start, stop), length in zip(layout.spans, lengths, strict=True)
        for first in range(start, stop, length)
    )
    return SegmentSpans(queries=spans, keys=spans, num_queries=layout.num_tokens, num_keys=layout.num_tokens)


if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True)
class JointLayout:
    """Each sample's tokens and its text tokens as one sequence; `layout.joint` of a [`PackedLayout`].

    Attributes:
        text_slots (`int`): Text tokens that each strip carries.
        strip_length (`int`): Tokens that each strip carries.
        rows (`int`): Strips of the pack.
        order (`torch.Tensor` of shape `(places,)`): For each token of the sequence its place among the tokens of all
            strips, `rows·strip_length`, followed by their text slots, `rows·text_slots`. Padding comes last.
        inverse (`torch.Tensor` of shape `(places,)`): For each place its token of the sequence.
        segments ([`SegmentSpans`]): Each sample's part of the sequence attends to itself.
        text_source (`torch.Tensor` of shape `(num_text_tokens,)`, *optional*): Place of each sample's text tokens
            among the stored ones; none where they lie in order.
        text_target (`torch.Tensor` of shape `(num_text_tokens,)`): The text slots of each sample's text tokens.
        first_rows (`torch.Tensor` of shape `(n,)`): The first strip of each sample.
    """

    text_slots: int
    strip_length: int
    rows: int
    order: torch.Tensor
    inverse: torch.Tensor
    segments: SegmentSpans
    text_source: torch.Tensor | None
    text_target: torch.Tensor
    first_rows: torch.Tensor

    def gather(self, tokens: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the sequence `(places, …)` of what lies in strips.

        Args:
            tokens (`torch.Tensor` of shape `(rows, strip_length, …)`): Of the strips.
            text (`torch.Tensor` of shape `(rows, text_slots, …)`): Their text slots.
        """
        return torch.cat([tokens.flatten(0, 1), text.flatten(0, 1)]).index_select(0, self.order)

    def scatter(self, sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put a sequence back into strips: the inverse of [`gather`]."""
        places = sequence.index_select(0, self.inverse)
        tokens, text = places.split([self.rows * self.strip_length, self.rows * self.text_slots])
        return tokens.unflatten(0, (self.rows, -1)), text.unflatten(0, (self.rows, -1))

    def text_rows(self, text: torch.Tensor) -> torch.Tensor:
        """Put a pack's stored texts into the strips of the samples that read them: `(rows, text_slots, …)`."""
        return self.deal(text if self.text_source is None else text.index_select(0, self.text_source))

    def deal(self, texts: torch.Tensor) -> torch.Tensor:
        """Put the samples' text tokens, one sample after the other, into strips; zeros as padding."""
        slots = texts.new_zeros(self.rows * self.text_slots, *texts.shape[1:])
        return slots.index_copy(0, self.text_target, texts).unflatten(0, (self.rows, -1))

    def collect(self, text: torch.Tensor) -> torch.Tensor:
        """Take the samples' text tokens out of strips `(rows, text_slots, …)` again: the inverse of [`deal`]."""
        return text.flatten(0, 1).index_select(0, self.text_target)


def joint_layout(layout: PackedLayout) -> JointLayout:
    """Return where the tokens of joint attention lie in a pack.

    Raises:
        PackingError: If the layout's strips carry no text.
    """
    if not layout.text_slots:
        raise PackingError("The strips of this layout carry no text; make one with text_slots of at least 1.")
    rows, width = layout.num_rows, layout.text_slots
    first_rows = [0, *itertools.accumulate(layout.rows)][:-1]
    targets = [row * width + np.arange(length) for row, length in zip(first_rows, layout.text_lengths, strict=True)]
    pieces = [
        np.concatenate([np.arange(*span), layout.num_tokens + slots])
        for span, slots in zip(layout.spans, targets, strict=True)
    ]
    stops = list(itertools.accumulate(map(len, pieces)))
    spans = tuple(zip([0, *stops[:-1]], stops, strict=True))
    places, real = rows * (layout.strip_length + width), np.concatenate(pieces)
    order = np.concatenate([real, np.setdiff1d(np.arange(places), real)])

    def on_device(index: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(index).to(layout.device)

    return JointLayout(
        text_slots=width,
        strip_length=layout.strip_length,
        rows=rows,
        order=on_device(order),
        inverse=on_device(np.argsort(order)),
        segments=SegmentSpans(queries=spans, keys=spans, num_queries=places, num_keys=places),
        text_source=layout.text_index,
        text_target=on_device(np.concatenate(targets)),
        first_rows=on_device(np.array(first_rows)),
    )


def fewest_places(layout: PackedLayout) -> int:
    """Return the text slots per strip with which a pack takes fewest places, tokens and text slots together.

    One slot per strip suits a long video; a small image with a long text needs many slots, or more strips than its
    tokens fill. The number is the same in all strips of a pack, so it is a compromise over its samples.

    Example:
        One token with a text of 12 beside a sample of 40 tokens with the same text, in strips of four. With two
        slots the first takes six strips and the second ten, `16·6 = 96` places; with twelve slots they would take one
        and ten, `11·16 = 176`:

        >>> from hf_bucketing.packing import PackedLayout
        >>> fewest_places(PackedLayout(grids=((1, 1, 1), (1, 5, 8)), text_lengths=(12, 12), strip_length=4))
        2
    """
    strips = -(-np.array(layout.lengths) // layout.strip_length)
    slots = np.arange(1, max(1, *layout.text_lengths) + 1)
    rows = np.maximum(strips, -(-np.array(layout.text_lengths) // slots[:, None])).sum(1)
    return int(slots[np.argmin(rows * (layout.strip_length + slots))])
