"""How a stream's rows are gathered: in stacks of one bucket, or in packs of any sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..errors import PlanError

Row = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Group:
    """Rows that wait for a batch.

    Attributes:
        key (`int`): Bucket id; −1 for a pack.
        ordinals (list of `int`): Places of the rows in the stream, rising.
        rows (list): The rows themselves.
        used (`int`): Tokens of a pack.
    """

    key: int
    ordinals: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    used: int = 0


class Grouping(Protocol):
    """A rule by which rows become batches."""

    def measure(self, row: Row) -> int | None:
        """Return a row's bucket id, or the tokens that it takes in a pack; None if it is rejected."""

    def add(self, groups: list[Group], row: Row, *, ordinal: int, measure: int) -> Group | None:
        """Put a row into one of the open groups; return one that is now complete."""

    def settings(self) -> dict[str, object]:
        """Return all that the batches depend on, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketGrouping:
    """Batches of one bucket.

    Args:
        table ([`BucketTable`] or [`OpenTable`]): Its ids are read from the rows' `bucket_id`, or computed from
            `num_frames`, `height` and `width`.
        batch_size (`int` or mapping of bucket id to `int`, *optional*): Samples per process and step.
        capacity (`int`, *optional*): Tokens per process and step, instead; needs `spec`.
        spec ([`LatentSpec`], *optional*): Strides and patch, for `capacity`.

    Raises:
        PlanError: If not exactly one of `batch_size` and `capacity` is given, or `spec` is missing.
    """

    table: BucketTable | OpenTable
    batch_size: int | Mapping[int, int] | None = None
    capacity: int | None = None
    spec: LatentSpec | None = None

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.capacity is None):
            raise PlanError("Give either batch_size or capacity.")
        if self.capacity is not None and self.spec is None:
            raise PlanError("capacity counts tokens: pass spec=LatentSpec(…) with it.")

    def size_of(self, bucket: int) -> int:
        """Return the samples of a full batch of a bucket.

        Raises:
            PlanError: If there is none, as a sample exceeds the capacity or a mapping lacks the bucket.
        """
        if self.capacity is not None:
            tokens = int(self.table.num_tokens(np.array([bucket]), spec=self.spec)[0])  # type: ignore[arg-type]
            if tokens > self.capacity:
                raise PlanError(
                    f"One sample of bucket {self.table.size(bucket)} takes {tokens} tokens and exceeds "
                    f"capacity={self.capacity}."
                )
            return self.capacity // tokens
        size = self.batch_size.get(bucket, 0) if isinstance(self.batch_size, Mapping) else self.batch_size
        if not size or size < 1:
            raise PlanError(f"batch_size names no size of 1 or more for bucket {bucket}, got {self.batch_size!r}.")
        return size

    def measure(self, row: Row) -> int | None:
        """Return a row's bucket id; None if it has none."""
        if "bucket_id" in row:
            bucket = int(row["bucket_id"])
        else:
            frames, height, width = _size(row)
            bucket = int(self.table.assign([frames], [height], [width]).bucket_id[0])
        return bucket if bucket >= 0 else None

    def add(self, groups: list[Group], row: Row, *, ordinal: int, measure: int) -> Group | None:
        """Put a row to those of its bucket."""
        group = next((group for group in groups if group.key == measure), None)
        if group is None:
            group = Group(measure)
            groups.append(group)
        group.rows.append({**row, "bucket_id": measure})
        group.ordinals.append(ordinal)
        return group if len(group.rows) >= self.size_of(measure) else None

    def settings(self) -> dict[str, object]:
        """Return all that the batches depend on, by name."""
        return {
            "mode": "bucket",
            "table": self.table.fingerprint,
            "batch_size": self.batch_size,
            "capacity": self.capacity,
            "spec": self.spec,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PackGrouping:
    """Packs: each sample goes into the oldest open pack that has room.

    Args:
        capacity (`int`): Tokens per process and step.
        spec ([`LatentSpec`], *optional*): Counts the tokens of rows without a `num_tokens` column, at their own size.
        open_packs (`int`): Packs held open at once; the fullest is closed when one more is needed.
        max_samples (`int`, *optional*): Largest number of samples per pack.
        multiple (`int`): Each sample takes its tokens rounded up to this multiple, as a pack of strips does.

    Raises:
        PlanError: On a value below 1.
    """

    capacity: int
    spec: LatentSpec | None = None
    open_packs: int = 16
    max_samples: int | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("capacity", "open_packs", "max_samples", "multiple"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} must be at least 1, got {value}.")

    def measure(self, row: Row) -> int | None:
        """Return the tokens that a row takes; None if it was rejected.

        Raises:
            PlanError: If they exceed the capacity, or cannot be told.
        """
        if "num_tokens" in row:
            tokens = int(row["num_tokens"])
        elif self.spec is not None:
            tokens = self.spec.num_tokens(self.spec.snap(_size(row)))
        else:
            raise PlanError("Rows have no num_tokens column; map BucketColumns over the stream, or pass spec=.")
        span = -(-tokens // self.multiple) * self.multiple
        if span > self.capacity:
            raise PlanError(
                f"Row {row.get('index', 'without an index')} takes {span} tokens and exceeds "
                f"capacity={self.capacity}; raise the capacity, or filter such rows out of the stream."
            )
        return span if span > 0 else None

    def add(self, groups: list[Group], row: Row, *, ordinal: int, measure: int) -> Group | None:
        """Put a row into the first pack with room."""
        group = next((group for group in groups if group.used + measure <= self.capacity), None)
        complete = None
        if group is None:
            if len(groups) == self.open_packs:
                complete = max(groups, key=lambda group: group.used)
            group = Group(-1)
            groups.append(group)
        group.rows.append(row)
        group.ordinals.append(ordinal)
        group.used += measure
        full = group.used == self.capacity or len(group.rows) == self.max_samples
        return complete if complete is not None else (group if full else None)

    def settings(self) -> dict[str, object]:
        """Return all that the batches depend on, by name."""
        names = ("capacity", "spec", "open_packs", "max_samples", "multiple")
        return {"mode": "pack", **{name: getattr(self, name) for name in names}}


def _size(row: Row) -> Size:
    missing = [name for name in ("num_frames", "height", "width") if name not in row]
    if missing:
        raise PlanError(f"A row of the stream lacks {missing}; map MediaMetadata over it first.")
    return Size(int(row["num_frames"]), int(row["height"]), int(row["width"]))
