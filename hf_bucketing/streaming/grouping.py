"""How a stream's rows are grouped: in stacks of one bucket, or in packs of any sizes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import NoneType
from typing import Any, TypeAlias

import numpy as np

from ..buckets.arrays import IntArray
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..errors import OversizeError, PlanError, refuse_old_names
from ..loaders.state import settings
from ..plans.bin_packing import FirstFit, Limits
from ..plans.packs import SHORTEN
from ..settings import check_at_least, check_types

Row = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Group:
    """Rows that wait for a batch.

    Attributes:
        key (`int`): Bucket id, or number of the pack; batches at the end of the stream come in this order.
        ordinals (list of `int`): Positions of the rows in the stream, rising.
        rows (list): The rows themselves.
        num_bytes (`int`): Memory that the rows take.
        saved (list): Key and ordinals as a place holds them; replaced, never changed, when a row is added.
    """

    key: int
    ordinals: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    num_bytes: int = 0
    saved: list[Any] = field(default_factory=list)


class OpenGroups(ABC):
    """The groups in which one worker's rows wait.

    Attributes:
        waiting (`dict`): The open groups by their keys, that of the oldest row first.
        num_rows (`int`): Rows in them.
        num_bytes (`int`): Memory that those take.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, Group] = {}
        self.num_rows = 0
        self.num_bytes = 0

    def __iter__(self) -> Iterator[Group]:
        return iter(self.waiting.values())

    @abstractmethod
    def add(self, row: Row, *, ordinal: int, measure: int, num_bytes: int) -> list[Group]:
        """Put a row of so many bytes into a group; return the groups that are complete now, which wait no longer."""

    @abstractmethod
    def restore(self, group: Group, measures: Sequence[int]) -> list[Group]:
        """Put back a group of a saved run, the oldest group first; return it if it is complete."""

    def flush(self, key: int) -> Group:
        """Remove a waiting group and return it, complete or not."""
        group = self.waiting.pop(key)
        self.num_rows -= len(group.rows)
        self.num_bytes -= group.num_bytes
        return group

    def _append(self, key: int, row: Row, ordinal: int, num_bytes: int) -> Group:
        group = self.waiting.get(key)
        if group is None:
            group = self.waiting[key] = Group(key)
        group.rows.append(row)
        group.ordinals.append(ordinal)
        group.saved = [key, group.ordinals[:]]
        group.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self.num_rows += 1
        return group


@refuse_old_names(capacity="max_tokens")
@dataclass(frozen=True, slots=True, kw_only=True)
class BucketGrouping:
    """Batches of one bucket.

    Args:
        table ([`BucketTable`] or [`OpenTable`]): Buckets of the rows. Their ids are read from the rows' `bucket_id`,
            or computed from `num_frames`, `height` and `width`.
        batch_size (`int` or mapping of bucket id to `int`, *optional*): Samples per process and step.
        max_tokens (`int`, *optional*): Tokens per process and step, instead of `batch_size`; needs `spec`.
        max_samples (`int`, *optional*): Most samples per batch, beside `max_tokens`.
        spec ([`LatentSpec`], *optional*): Strides and patch, for `max_tokens`.
        text_tokens (`int`): Tokens of each sample's padded text, for models with joint attention; they count like the
            sample's own.

    Raises:
        PlanError: If not exactly one of `batch_size` and `max_tokens` is given, `spec` is missing, or a value is no
            whole number from 1, `text_tokens` from 0.
    """

    table: BucketTable | OpenTable
    batch_size: int | Mapping[int, int] | None = None
    max_tokens: int | None = None
    max_samples: int | None = None
    spec: LatentSpec | None = None
    text_tokens: int = 0

    def __post_init__(self) -> None:
        check_types(self, error=PlanError)
        check_at_least(1, self, "max_tokens", "max_samples", error=PlanError)
        check_at_least(0, self, "text_tokens", error=PlanError)
        if (self.batch_size is None) == (self.max_tokens is None):
            raise PlanError(
                f"Give either batch_size or max_tokens, got batch_size={self.batch_size!r} and "
                f"max_tokens={self.max_tokens!r}."
            )
        if self.max_tokens is not None and self.spec is None:
            raise PlanError("max_tokens counts tokens: pass spec=LatentSpec(…) with it.")

    def size_of(self, bucket: int) -> int:
        """Return the samples of a full batch of a bucket.

        Raises:
            PlanError: If a sample of the bucket exceeds `max_tokens`, or a mapping lacks the bucket.
        """
        if self.max_tokens is not None:
            tokens = int(self.table.num_tokens(np.array([bucket]), spec=self.spec)[0])  # type: ignore[arg-type]
            tokens += self.text_tokens
            if tokens > self.max_tokens:
                raise PlanError(
                    f"One sample of bucket {self.table.size(bucket)} takes {tokens} tokens and exceeds "
                    f"`max_tokens={self.max_tokens}`."
                )
            return min(self.max_tokens // tokens, self.max_samples or self.max_tokens)
        size = self.batch_size.get(bucket, 0) if isinstance(self.batch_size, Mapping) else self.batch_size
        if not size or size < 1:
            raise PlanError(f"batch_size names no size of 1 or more for bucket {bucket}, got {self.batch_size!r}.")
        return size

    def measures(self, rows: Sequence[Row]) -> list[int | None]:
        """Return the bucket id of each row; None if it has none."""
        sizes = _sizes([row for row in rows if "bucket_id" not in row])
        assigned = iter(self.table.assign(*sizes.T).bucket_id.tolist())
        ids = [row["bucket_id"] if "bucket_id" in row else next(assigned) for row in rows]
        return [int(bucket) if bucket >= 0 else None for bucket in ids]

    def start(self) -> OpenGroups:
        """Return the groups of a worker that has read no row."""
        return _BucketGroups(self)

    def settings(self) -> dict[str, object]:
        """Return all that the batches depend on, by name."""
        return {"mode": "bucket", **settings(self), "table": self.table.fingerprint}


class _BucketGroups(OpenGroups):
    """One group per bucket."""

    def __init__(self, grouping: BucketGrouping) -> None:
        super().__init__()
        self.grouping = grouping
        self._sizes: dict[int, int] = {}

    def add(self, row: Row, *, ordinal: int, measure: int, num_bytes: int) -> list[Group]:
        if measure not in self._sizes:
            self._sizes[measure] = self.grouping.size_of(measure)
        group = self._append(measure, {**row, "bucket_id": measure}, ordinal, num_bytes)
        return [self.flush(measure)] if len(group.rows) >= self._sizes[measure] else []

    def restore(self, group: Group, measures: Sequence[int]) -> list[Group]:
        for row, ordinal, measure in zip(group.rows, group.ordinals, measures, strict=True):
            self._append(group.key, {**row, "bucket_id": measure}, ordinal, bytes_of(row))
        return []  # a complete batch of a bucket is sent before the next row is read


@refuse_old_names(capacity="max_tokens", multiple="strip_length")
@dataclass(frozen=True, slots=True, kw_only=True)
class PackGrouping:
    """Packs: each sample goes into the oldest open pack that has room.

    This is the `"first_fit"` of [`PackBatchSampler`][hf_bucketing.PackBatchSampler], for rows as they come.

    Args:
        max_tokens (`int`): Tokens per process and step.
        spec ([`LatentSpec`], *optional*): Counts the tokens of rows without a `num_tokens` column, at their own size.
        open_packs (`int`): Packs held open at once; the fullest is closed when one more is needed.
        max_samples (`int`, *optional*): Largest number of samples per pack.
        strip_length (`int`): Each sample takes its tokens rounded up to whole strips of this length, that of
            `enable_packing`; 1 for packs that are not cut into strips.
        text_tokens (`int`): Tokens of each sample's padded text, for models with joint attention; they count like the
            sample's own, but are not rounded to strips.

    Raises:
        PlanError: On a value below 1, of `text_tokens` below 0.
    """

    max_tokens: int
    spec: LatentSpec | None = None
    open_packs: int = 16
    max_samples: int | None = None
    strip_length: int = 64
    text_tokens: int = 0

    def __post_init__(self) -> None:
        check_types(self, error=PlanError)
        check_at_least(1, self, "max_tokens", "open_packs", "max_samples", "strip_length", error=PlanError)
        check_at_least(0, self, "text_tokens", error=PlanError)

    def measures(self, rows: Sequence[Row]) -> list[int | None]:
        """Return the tokens that each row takes; None if it was rejected.

        Raises:
            PlanError: If they exceed `max_tokens`, or cannot be computed.
        """
        sizes = _sizes([row for row in rows if "num_tokens" not in row])
        if len(sizes) and self.spec is None:
            raise PlanError("Rows have no num_tokens column; map BucketColumns over the stream, or pass spec=.")
        counted = iter(self._tokens(sizes) if len(sizes) else ())
        spans = []
        for row in rows:
            tokens = int(row["num_tokens"]) if "num_tokens" in row else next(counted)
            span = -(-tokens // self.strip_length) * self.strip_length + self.text_tokens * (tokens > 0)
            if span > self.max_tokens:
                strips = f", in strips of {self.strip_length}," if tokens % self.strip_length else ""
                raise OversizeError(
                    f"Row {row.get('index', 'without an index')} takes {span} tokens{strips} and exceeds "
                    f"`max_tokens={self.max_tokens}`.",
                    advice=["raise `max_tokens`", SHORTEN, "filter such rows out of the stream"],
                )
            spans.append(span if span > 0 else None)
        return spans

    def _tokens(self, sizes: IntArray) -> list[int]:
        """Return the tokens of each size, 0 for that of an unreadable file."""
        assert self.spec is not None, "measures checks it"
        t, h, w = self.spec.grid_of(*self.spec.snap_arrays(*np.maximum(sizes, 1).T))
        return np.where(sizes.min(axis=1) > 0, t * h * w, 0).tolist()

    def start(self) -> OpenGroups:
        """Return the groups of a worker that has read no row."""
        return _PackGroups(self)

    def settings(self) -> dict[str, object]:
        """Return all that the batches depend on, by name."""
        return {"mode": "pack", **settings(self)}


class _PackGroups(OpenGroups):
    """One group per open pack."""

    def __init__(self, grouping: PackGrouping) -> None:
        super().__init__()
        samples = math.inf if grouping.max_samples is None else grouping.max_samples
        limits = Limits(grouping.max_tokens, math.inf, samples, smallest=grouping.strip_length, cheapest=0.0)
        self.packs = FirstFit(limits, open_packs=grouping.open_packs)

    def add(self, row: Row, *, ordinal: int, measure: int, num_bytes: int) -> list[Group]:
        self._append(self.packs.add(measure), row, ordinal, num_bytes)
        return self._complete()

    def restore(self, group: Group, measures: Sequence[int]) -> list[Group]:
        number = self.packs.reopen(sum(measures), count=len(measures))
        for row, ordinal in zip(group.rows, group.ordinals, strict=True):
            self._append(number, row, ordinal, bytes_of(row))
        return self._complete()

    def flush(self, key: int) -> Group:
        self.packs.close(key)
        self.packs.closed.clear()
        return super().flush(key)

    def _complete(self) -> list[Group]:
        groups = [super(_PackGroups, self).flush(number) for number in self.packs.closed]
        self.packs.closed.clear()
        return groups


Grouping: TypeAlias = BucketGrouping | PackGrouping
"""A rule by which rows become batches."""


def bytes_of(row: Any) -> int:
    """Return about how much memory a row takes: its bytes, texts, arrays, tensors and images, at any depth."""
    total = 0
    for value in row.values() if isinstance(row, Mapping) else row:
        kind = type(value)
        if kind in _NUMBERS:
            total += 8
        elif kind is bytes or kind is str:
            total += len(value)
        elif isinstance(value, Mapping | list | tuple):
            total += bytes_of(value)
        elif hasattr(value, "getbands"):  # an image of Pillow
            total += value.width * value.height * len(value.getbands())
        else:
            total += getattr(value, "nbytes", 8)
    return total


_NUMBERS = {int, float, bool, NoneType}


def _sizes(rows: Sequence[Row]) -> IntArray:
    """Return frames, heights and widths, shape `(n, 3)`."""
    try:
        return np.array(list(map(_SIZE, rows)), np.int64).reshape(-1, 3)
    except KeyError as error:
        raise PlanError(f"A row of the stream lacks {error}; map MediaMetadata over it first.") from error


_SIZE = itemgetter("num_frames", "height", "width")
