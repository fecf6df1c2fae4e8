"""The values that attention backends read: segments of a pack, which say which tokens attend to which; settings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch

from ..devices import to_device
from ..errors import PackingError

MOST_SEGMENTS = 65_535
"""Segments that kernels of variable lengths take: an axis of a CUDA grid has no more blocks."""
SHORT_SEGMENT = 32
"""Queries below which such kernels mostly compute padding, in forward blocks of 64 and backward blocks of 128."""

Span = tuple[int, int]
T = TypeVar("T")


class KeyBounds(NamedTuple):
    """The range of keys that each query attends to.

    Attributes:
        start (`torch.Tensor` of shape `(num_queries,)`): `int32`, the first key of each query.
        stop (`torch.Tensor` of shape `(num_queries,)`): `int32`, the key after each query's last; `start` for none.
    """

    start: torch.Tensor
    stop: torch.Tensor


class VarlenOffsets(NamedTuple):
    """Segments as offsets, for kernels of variable lengths; padding forms segments of its own.

    Attributes:
        cu_seqlens_q (`torch.Tensor` of shape `(n + 1,)`): `int32`, from 0 to `num_queries`.
        cu_seqlens_k (`torch.Tensor` of shape `(n + 1,)`): `int32`, from 0 to the number of keys.
        longest (`torch.Tensor` of shape `(max_q, max_k, 0)`): Queries of the longest segment and keys of the longest,
            rounded up to powers of two, see [`as_sizes`].
        key_index (`torch.Tensor`, *optional*): Keys in the order of the segments, where segments share keys or order
            them differently; None where the keys lie in that order.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    longest: torch.Tensor
    key_index: torch.Tensor | None

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """The offsets and the lengths of the longest segments, in the order in which all kernels take them."""
        max_q, max_k, _ = self.longest.shape
        return self.cu_seqlens_q, self.cu_seqlens_k, max_q, max_k


class AttentionOptions(NamedTuple):
    """Settings of [`packed_attention`][hf_bucketing.packing.packed_attention]."""

    scale: float | None = None
    dropout: float = 0.0
    enable_gqa: bool = False

    def for_sdpa(self) -> dict[str, Any]:
        """Return the arguments of `scaled_dot_product_attention`."""
        return {"dropout_p": self.dropout, "scale": self.scale, "enable_gqa": self.enable_gqa}


@dataclass(frozen=True, kw_only=True)
class SegmentSpans:
    """Pairs of spans that attend to each other: `query[slice(*queries[i])]` and `key[slice(*keys[i])]`.

    What backends derive from it is made once per device and kept, so that no layer waits for a copy to the device.

    Args:
        queries (tuple of `(start, stop)`): Queries of each segment, ascending and without overlap.
        keys (tuple of `(start, stop)`): Keys of each segment.
        num_queries (`int`): Tokens on the query side, padding included.
        num_keys (`int`): Tokens on the key side, padding included.
        more_keys (tuple of `(start, stop)`, *optional*): A second span of keys of each segment, apart from the first;
            `(0, 0)` for none.
    """

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    num_queries: int
    num_keys: int
    more_keys: tuple[Span, ...] | None = None

    @classmethod
    def within(cls, spans: Sequence[Span], num_tokens: int) -> SegmentSpans:
        """Return the attention of the tokens of each span to each other."""
        return cls(queries=tuple(spans), keys=tuple(spans), num_queries=num_tokens, num_keys=num_tokens)

    @cached_property
    def keys_ascend(self) -> bool:
        """Whether the keys of each segment lie after those of the segment before."""
        return all(stop <= start for (_, stop), (start, _) in itertools.pairwise(self.keys))

    @cached_property
    def suits_varlen(self) -> bool:
        """Whether kernels of variable lengths compute these segments well: not too many, and not too short."""
        return len(self.queries) <= min(MOST_SEGMENTS, self.num_queries // SHORT_SEGMENT)

    @cached_property
    def has_keys(self) -> bool:
        """Whether there is any key."""
        return self.num_keys > 0

    @cached_property
    def pairs_of_a_call(self) -> int:
        """Pairs of a query and a key for each call of the backend `"segments"`: one for segments of equal lengths."""
        sides = zip(self.queries, self.keys, strict=True)
        lengths = [(stop - start, last - first) for (start, stop), (first, last) in sides]
        return sum(queries * keys for queries, keys in lengths) // max(1, len(set(lengths)))

    @property
    def key_sides(self) -> tuple[tuple[Span, ...], ...]:
        """The first span of keys of each segment, and the second ones where there are some."""
        return (self.keys,) if self.more_keys is None else (self.keys, self.more_keys)

    def key_bounds(self, device: torch.device) -> tuple[KeyBounds, ...]:
        """Return the range of keys of each query, and the second ones where there are some; empty for padding."""

        def bounds_of(side: tuple[Span, ...]) -> KeyBounds:
            bounds = torch.zeros(2, self.num_queries, dtype=torch.int32)
            for (start, stop), keys in zip(self.queries, side, strict=True):
                bounds[:, start:stop] = torch.tensor(keys)[:, None]
            return KeyBounds(*to_device(bounds, device))

        return self.made(("key_bounds", device), lambda: tuple(map(bounds_of, self.key_sides)))

    def has_key(self, device: torch.device) -> torch.Tensor:
        """Return which queries have a key: `bool`, `(num_queries,)`."""

        def make() -> torch.Tensor:
            has_keys = [bounds.stop > bounds.start for bounds in self.key_bounds(device)]
            return functools.reduce(torch.logical_or, has_keys)

        return self.made(("has_key", device), make)

    def joined(self, device: torch.device) -> tuple[torch.Tensor, SegmentSpans]:
        """Return an index of keys, and the segments over keys in its order, each of which has one span.

        Keys of several segments are repeated, for kernels that take one range of keys for each.

        Example:
            Two frames of a sample, the second of which has a key behind those of the sample:

            >>> segments = SegmentSpans(
            ...     queries=((0, 2), (2, 4)), keys=((0, 4),) * 2, more_keys=((0, 0), (5, 6)), num_queries=4, num_keys=6
            ... )
            >>> index, joined = segments.joined("cpu")
            >>> index.tolist(), joined.keys
            ([0, 1, 2, 3, 0, 1, 2, 3, 5], ((0, 4), (4, 9)))
        """

        def make() -> tuple[torch.Tensor, SegmentSpans]:
            spans = list(zip(*self.key_sides, strict=True))
            index = torch.cat([torch.arange(*span) for pair in spans for span in pair])
            ends = itertools.accumulate((sum(stop - start for start, stop in pair) for pair in spans), initial=0)
            keys = tuple(itertools.pairwise(ends))
            return to_device(index, device), replace(self, keys=keys, num_keys=len(index), more_keys=None)

        return self.made(("joined", device), make)

    def varlen(self, device: torch.device) -> VarlenOffsets:
        """Return the segments as offsets.

        Padding of queries becomes segments without keys, and padding of keys segments without queries. Kernels write
        zeros for them, so padding costs no attention and no copy to remove it.

        Example:
            Two samples of three and one tokens in strips of four:

            >>> spans = ((0, 3), (4, 5))
            >>> offsets = SegmentSpans(queries=spans, keys=spans, num_queries=8, num_keys=8).varlen("cpu")
            >>> offsets.cu_seqlens_q.tolist()
            [0, 3, 4, 4, 5, 8, 8]
            >>> offsets.cu_seqlens_k.tolist()
            [0, 3, 3, 4, 5, 5, 8]

        Raises:
            PackingError: If there are more segments than kernels take.
        """
        return self.made(("varlen", device), lambda: self._varlen(device))

    def _varlen(self, device: torch.device) -> VarlenOffsets:
        lengths, query_end, key_end = [], 0, 0
        end = ((self.num_queries, self.num_queries), (self.num_keys, self.num_keys))
        for queries, keys in [*zip(self.queries, self.keys, strict=True), end]:
            padding = queries[0] - query_end, keys[0] - key_end if self.keys_ascend else 0
            lengths += [(padding[0], 0)] if padding[0] else []
            lengths += [(0, padding[1])] if padding[1] else []
            lengths.append((queries[1] - queries[0], keys[1] - keys[0]))
            query_end, key_end = queries[1], keys[1]
        query_lengths, key_lengths = zip(*lengths[:-1], strict=True)
        if len(query_lengths) > MOST_SEGMENTS:
            raise PackingError(
                f"The attention backend 'varlen' takes up to {MOST_SEGMENTS:,} segments, and this pack has "
                f"{len(query_lengths):,}; use 'auto', or 'segments', which always works."
            )
        key_index = None
        if not self.keys_ascend:
            key_index = to_device(torch.cat([torch.arange(*span) for span in self.keys]), device)
        offsets = [to_device(_offsets(lengths), device) for lengths in (query_lengths, key_lengths)]
        for side in offsets:
            torch._dynamo.maybe_mark_dynamic(side, 0)
        longest = as_sizes(_round_up(max(query_lengths)), _round_up(max(key_lengths)))
        return VarlenOffsets(offsets[0], offsets[1], longest, key_index)

    def made(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned when it was first called for `key`."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}


def as_sizes(*numbers: int) -> torch.Tensor:
    """Return numbers as the shape of a tensor without elements, `(*numbers, 0)`.

    Graphs of `torch.compile` take sizes of tensors as variables, where they hold other numbers to be constants.
    """
    sizes = torch.empty(*numbers, 0)
    torch._dynamo.maybe_mark_dynamic(sizes, list(range(len(numbers))))
    return sizes


def _round_up(length: int) -> int:
    """Round up to a power of two from 2 on: kernels need an upper bound, and graphs hold sizes of 0 and 1 constant."""
    return 1 << max(1, (length - 1).bit_length())


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
