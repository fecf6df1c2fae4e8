"""How a stream's rows are grouped: in stacks of one bucket, or in packs of any sizes."""

from __future__ import annotations

import functools
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
from ..columns.faults import path_of
from ..columns.stream_columns import MEDIA
from ..conditions.rows import ConditionRules
from ..errors import BucketingError, OversizeError, PlanError, explains_arguments
from ..loaders.bucket_sampler import check_table
from ..plans.bin_packing import FirstFit
from ..plans.buckets import BucketLimits
from ..plans.packs import SHORTEN, PackLimits, strip_tokens
from ..randomness import ROW
from ..settings import check_at_least

Row = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Group:
    """Rows that wait for a batch.

    Attributes:
        key (`int`): Bucket id and sizes of conditions, or number of the pack; batches at the end of the stream come
            in this order.
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
        waiting (`dict`): The open groups by their keys, that of the oldest row first; behind them those that were put
            back.
        num_rows (`int`): Rows in them.
        num_bytes (`int`): Memory that those take.
    """

    def __init__(self, grouping: Grouping) -> None:
        self.grouping = grouping
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

    def slot(self, key: int) -> int:
        """Return the number that a group shares with those whose rows may take the places of its unreadable ones."""
        return key

    def put_back(self, group: Group) -> list[Group]:
        """Let the rows of a group wait again, as the newest group; return it if it is complete as it is.

        Raises:
            BucketingError: If a row of it is rejected.
        """
        measures = self.grouping.measures(group.rows)
        if None in measures:
            raise BucketingError("A row that the saved run kept is rejected now; the stream has changed.")
        return self.restore(group, [measure for measure in measures if measure is not None])

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


@explains_arguments()
@dataclass(frozen=True, kw_only=True)
class BucketGrouping(BucketLimits):
    """Batches of one bucket, of as many samples as [`BucketLimits`][hf_bucketing.plans.BucketLimits] says.

    Args:
        table ([`BucketTable`] or [`OpenTable`]): Buckets of the rows. Their ids are read from the rows' `bucket_id`,
            or computed from `num_frames`, `height` and `width`.
        spec ([`LatentSpec`], *optional*): Strides and patch, for `max_tokens` and `max_cost`.
        text_tokens (`int`): Tokens of each sample's padded text, for models with joint attention; they count like the
            sample's own.
        conditions ([`ConditionRules`][hf_bucketing.conditions.rows.ConditionRules]): How the conditions of rows are
            counted, by their columns, such as `reference_sizes` or `has_audio`. They count like the sample's own
            tokens, and a batch holds rows whose references have equal sizes, and whose audio is equally long, or that
            have none. Needs `spec`.

    Raises:
        PlanError: On limits that `BucketLimits` refuses, if `spec` is missing, or `text_tokens` is below 0.
    """

    table: BucketTable | OpenTable
    spec: LatentSpec | None = None
    text_tokens: int = 0
    conditions: ConditionRules = field(default_factory=ConditionRules)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(0, self, "text_tokens", error=PlanError)
        if (self.limited or self.conditions) and self.spec is None:
            raise PlanError("Limits and `conditions` count tokens: pass spec=LatentSpec(…).")
        if self.cost_model is not None and self.max_cost is None:
            raise PlanError("Omit `cost_model`: no effect without `max_cost`.")

    def check_columns(self, features: Mapping[str, Any] | None) -> None:
        """Raise PlanError if the columns of a stream say that its buckets are those of another table."""
        check_table(features, self.table, column="bucket_id")

    def size_of(self, bucket: int, *, condition_tokens: int = 0) -> int:
        """Return the samples of a full batch of a bucket, each with so many tokens of conditions.

        Raises:
            PlanError: If a sample of the bucket exceeds a limit, or a mapping lacks the bucket.
        """
        more = self.text_tokens + condition_tokens
        return int(self.solved_sizes(np.array([bucket]), table=self.table, spec=self.spec, text_tokens=more)[0])

    def measures(self, rows: Sequence[Row]) -> list[int | None]:
        """Return the key of each row's group; None if rejected.

        It is the bucket id, below what tells its conditions.
        """
        ids = self._bucket_ids(rows)
        if not self.conditions:
            return ids
        assert self.spec is not None, "__post_init__ checks it"
        columns = _columns_of(rows, self.conditions.columns)
        conditions = self.conditions.rows(columns, num_rows=len(rows))
        samples = [(0, 0, 0) if bucket is None else self.table.size(bucket) for bucket in ids]
        keys = zip(ids, conditions.keys(samples, spec=self.spec), strict=True)
        return [None if bucket is None else bucket | key << _BUCKET_BITS for bucket, key in keys]

    def condition_tokens_of(self, key: int) -> int:
        """Return the tokens of the conditions of a row of a group by its key."""
        if not self.conditions:
            return 0
        assert self.spec is not None, "__post_init__ checks it"
        size = self.table.size(_bucket_of(key))
        return self.conditions.tokens_of_key(key >> _BUCKET_BITS, size, spec=self.spec)

    def _bucket_ids(self, rows: Sequence[Row]) -> list[int | None]:
        """Return the bucket id of each row; None if it has none."""
        sizes = _sizes_of_rows([row for row in rows if "bucket_id" not in row])
        assigned = iter(self.table.assign(*sizes.T).bucket_id.tolist())
        ids = [row["bucket_id"] if "bucket_id" in row else next(assigned) for row in rows]
        return [int(bucket) if bucket >= 0 else None for bucket in ids]

    def start(self) -> OpenGroups:
        """Return the groups of a worker that has read no row."""
        return _BucketGroups(self)

    def settings(self) -> dict[str, object]:
        """Return all that the batches depend on, by name; costs only where they limit a batch."""
        unused = [] if self.max_cost is not None else ["max_cost", "cost_model"]
        limits = {name: value for name, value in vars(self).items() if name not in [*unused, "conditions"]}
        return {"mode": "bucket", **limits, **self.conditions.settings(), "table": self.table.fingerprint}


class _BucketGroups(OpenGroups):
    """One group per bucket and conditions of equal sizes."""

    def __init__(self, grouping: BucketGrouping) -> None:
        super().__init__(grouping)
        self._size_of = functools.cache(
            lambda key: grouping.size_of(_bucket_of(key), condition_tokens=grouping.condition_tokens_of(key))
        )

    def add(self, row: Row, *, ordinal: int, measure: int, num_bytes: int) -> list[Group]:
        group = self._append(measure, {**row, "bucket_id": _bucket_of(measure)}, ordinal, num_bytes)
        return [self.flush(measure)] if len(group.rows) >= self._size_of(measure) else []

    def restore(self, group: Group, measures: Sequence[int]) -> list[Group]:
        for row, ordinal, measure in zip(group.rows, group.ordinals, measures, strict=True):
            self._append(group.key, {**row, "bucket_id": _bucket_of(measure)}, ordinal, bytes_of(row))
        return []  # a complete batch of a bucket is sent before the next row is read


_BUCKET_BITS = 31
"""Bits of a bucket id in the key of a group; above them comes the key of its conditions."""


def _bucket_of(key: int) -> int:
    return key & (1 << _BUCKET_BITS) - 1


def _columns_of(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return columns of rows of a stream.

    Raises:
        PlanError: If a row lacks one.
    """
    try:
        return {name: [row[name] for row in rows] for name in names}
    except KeyError as error:
        raise PlanError(f"A row of the stream lacks {error}; prepare the stream with its conditions.") from error


@explains_arguments()
@dataclass(frozen=True, kw_only=True)
class PackGrouping(PackLimits):
    """Packs within [`PackLimits`][hf_bucketing.plans.PackLimits]: a sample joins the oldest open pack with room.

    This is the `"first_fit"` of [`PackBatchSampler`][hf_bucketing.PackBatchSampler], for rows as they come.

    Args:
        spec ([`LatentSpec`], *optional*): Counts the tokens of rows without a `num_tokens` column, at their own size.
        text_tokens (`int`): Tokens of each sample's padded text, for models with joint attention; they count like the
            sample's own, but are not rounded to strips.

    Raises:
        PlanError: On limits that `PackLimits` refuses, or `text_tokens` below 0.
    """

    spec: LatentSpec | None = None
    text_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(0, self, "text_tokens", error=PlanError)

    def check_columns(self, features: Mapping[str, Any] | None) -> None:
        """Check nothing: the tokens of rows do not say by which table they were counted."""

    def measures(self, rows: Sequence[Row]) -> list[int | None]:
        """Return the tokens that each row takes; None if it was rejected.

        Raises:
            PlanError: If they exceed `max_tokens`, or cannot be computed.
        """
        sizes = _sizes_of_rows([row for row in rows if "num_tokens" not in row])
        if len(sizes) and self.spec is None:
            raise PlanError("Rows have no num_tokens column; map BucketColumns over the stream, or pass spec=.")
        counted = iter(self._tokens(sizes) if len(sizes) else ())
        spans = []
        for row in rows:
            tokens = int(row["num_tokens"]) if "num_tokens" in row else next(counted)
            span = strip_tokens(tokens, self.strip_length) + self.text_tokens if tokens > 0 else 0
            if span > self.max_tokens:
                strips = f", in strips of {self.strip_length}," if tokens % self.strip_length else ""
                name = path_of(row.get(MEDIA)) or f"Row {row.get(ROW, 'without a number')}"
                raise OversizeError(
                    f"{name} takes {span} tokens{strips} and exceeds `max_tokens={self.max_tokens}`.",
                    advice=["raise `max_tokens`", SHORTEN, "filter such rows out of the stream"],
                )
            spans.append(span or None)
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
        return {"mode": "pack", **vars(self)}


class _PackGroups(OpenGroups):
    """One group per open pack."""

    def __init__(self, grouping: PackGrouping) -> None:
        super().__init__(grouping)
        self.packs = FirstFit(grouping.of_bins(smallest=grouping.strip_length), open_packs=grouping.open_packs)

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

    def slot(self, key: int) -> int:
        return 0

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


def _sizes_of_rows(rows: Sequence[Row]) -> IntArray:
    """Return frames, heights and widths, shape `(n, 3)`."""
    try:
        return np.array(list(map(_SIZE, rows)), np.int64).reshape(-1, 3)
    except KeyError as error:
        raise PlanError(f"A row of the stream lacks {error}; map MediaMetadata over it first.") from error


_SIZE = itemgetter("num_frames", "height", "width")
