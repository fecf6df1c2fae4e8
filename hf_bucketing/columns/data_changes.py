"""What changed between two locks of data sets: rows added, removed and changed, and in what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from .data_lock import LOCKED, DataLock, hashed
from .faults import NAMED_ROWS, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChanges:
    """Rows that differ between two locks.

    Attributes:
        added (array of `int`): Rows of the later lock alone.
        removed (array of `int`): Rows of the earlier lock alone.
        was (array of `int`, shape `(k,)`): Changed rows, as rows of the earlier lock.
        now (array of `int`, shape `(k,)`): The same rows in the later lock.
        fields (mapping of `str` to `bool` arrays of shape `(k,)`): Whether each of them differs in its `file`,
            `size`, `caption` and `conditions`.
        moved (`bool`): Whether the rows that are in both have another order.
    """

    added: IntArray
    removed: IntArray
    was: IntArray
    now: IntArray
    fields: Mapping[str, npt.NDArray[np.bool_]]
    moved: bool

    def fields_of(self, position: int) -> list[str]:
        """Return in what the changed row at a position of `was` and `now` differs."""
        return [name for name, differs in self.fields.items() if differs[position]]

    def describe(self, name_row: Callable[[int], str] = "row {}".format) -> str:
        """Return a sentence on the number of these rows, which names the first changed ones; `""` without changes.

        Args:
            name_row (callable): Returns the name of a row of the later lock.
        """
        parts = [
            f"{len(rows):,} {name}" for name, rows in (("added", self.added), ("removed", self.removed)) if len(rows)
        ]
        if len(self.now):
            kinds = ", ".join(f"{count:,} in {name}" for name, of in self.fields.items() if (count := of.sum()))
            first = listed(
                [name_row(row) for row in self.now[:NAMED_ROWS].tolist()], total=len(self.now), separator=", "
            )
            parts.append(f"{len(self.now):,} changed ({kinds}; {first})")
        if not parts:
            return "The same rows in another order." if self.moved else ""
        return f"Rows: {', '.join(parts)}."


def compare_locks(was: DataLock, now: DataLock) -> DataChanges:
    """Pair the rows of two locks, and return what differs.

    Rows that are alike in everything are paired first, then rows of the same file and size, and then rows of the same
    file: so a clip that is removed makes no difference to the other clips of its file.
    """
    left, right = np.arange(len(was)), np.arange(len(now))
    same, *others = ("name", *LOCKED), ("name", "size"), ("name",)
    before, after = _pairs(was, now, left, right, same)
    moved = bool(len(before)) and not np.array_equal(after[np.argsort(before)], np.sort(after))
    left, right = np.setdiff1d(left, before), np.setdiff1d(right, after)
    changed = []
    for keys in others:
        before, after = _pairs(was, now, left, right, keys)
        changed.append(np.stack([before, after]))
        left, right = np.setdiff1d(left, before), np.setdiff1d(right, after)
    pairs = np.concatenate(changed, axis=1)
    before, after = pairs[:, np.argsort(pairs[1])]
    differs = {name: getattr(was, name)[before] != getattr(now, name)[after] for name in LOCKED}
    return DataChanges(added=right, removed=left, was=before, now=after, fields=differs, moved=moved)


def _pairs(
    was: DataLock, now: DataLock, left: IntArray, right: IntArray, keys: tuple[str, ...]
) -> tuple[IntArray, IntArray]:
    """Pair some rows of two locks that are alike in `keys`, each row at most once, in their order."""
    before, after = (hashed(*(getattr(lock, key)[rows] for key in keys)) for lock, rows in ((was, left), (now, right)))
    order, target = np.argsort(before, kind="stable"), np.argsort(after, kind="stable")
    sought, held = before[order], after[target]
    rank = np.arange(len(sought)) - np.searchsorted(sought, sought)
    place = np.searchsorted(held, sought) + rank
    paired = place < np.searchsorted(held, sought, side="right")
    return left[order[paired]], right[target[place[paired]]]
