"""Where each sample's tokens lie in a pack: the value that attention, positions, targets and losses read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ..errors import PackingError
from .attention import Backend, prepare_segments
from .frame_layout import FrameLayout, frame_layout
from .joint_layout import JointLayout, joint_layout
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
