"""A lock of a data set: for each row, hashes of what a model sees of it; and what changed between two locks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from pyarrow import feather

from ..buckets.arrays import IntArray
from ..buckets.open_table import OpenTable
from ..buckets.table import BucketTable
from ..conditions.audio import HAS_AUDIO
from ..conditions.names import REFERENCE, all_columns
from ..conditions.references import REFERENCE_SIZES
from ..conditions.rows import sample_sizes
from ..errors import BucketingError, MediaError
from ..files import complete_file
from ..media.rows import CLIP_END, CLIP_START, MediaColumns
from .arrays import SIZE_COLUMNS, cell_of_list, is_list_type, media_kind, numbers, table_batches, whole_numbers
from .faults import NAMED_ROWS, listed, path_of

LOCK_FILE = "data_lock.arrow"
"""File of the lock in a prepared folder, and in the output folder of a run."""

RULE_VERSION = 1
"""Raised when hashes, or the crop of a view, change for the same rows."""

_VERSION = b"rule_version"
_ROWS, _ROWS_WITH_BYTES = 100_000, 64
"""Rows that are read at once; few where their files are in memory."""
_THREADS, _FILES_OF_A_THREAD = 8, 1000

Hashes = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLock:
    """Hold hashes of the rows of a data set, in their order: 24 bytes per row.

    Attributes:
        name (array of `uint64`, shape `(n,)`): Path of the file as the row has it, or what bytes without one are.
        file (array of `uint32`, shape `(n,)`): Length and time of modification of the file; bytes by their length and
            their ends, a URL by itself alone.
        size (array of `uint32`, shape `(n,)`): Clip, size and frame rate, and the sizes that the row is cropped to in
            buckets and in packs.
        caption (array of `uint32`, shape `(n,)`): Captions as they are read.
        conditions (array of `uint32`, shape `(n,)`): Files of conditions and references, whether the model hears the
            row's audio, and the rules of references and of audio.
    """

    name: npt.NDArray[np.uint64]
    file: npt.NDArray[np.uint32]
    size: npt.NDArray[np.uint32]
    caption: npt.NDArray[np.uint32]
    conditions: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.name)

    @property
    def rows(self) -> npt.NDArray[np.uint64]:
        """One hash of each row, `uint64` of shape `(n,)`."""
        return hashed(*(getattr(self, name) for name in ("name", *LOCKED)))

    @property
    def digest(self) -> str:
        """Sixteen hex digits of all rows and their order."""
        return hashlib.sha256(self.rows.data).hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the lock to a file."""
        table = pa.table({field.name: getattr(self, field.name) for field in fields(self)})
        with complete_file(path) as partial:
            marked = table.replace_schema_metadata({_VERSION: str(RULE_VERSION)})
            feather.write_feather(marked, str(partial), compression="uncompressed")


LOCKED = tuple(field.name for field in fields(DataLock) if field.name != "name")
"""What can differ in a row of the same file."""


def read_lock(folder: str | os.PathLike[str]) -> DataLock | None:
    """Return the lock in a prepared folder or in the output folder of a run.

    None if it was written before there were locks, or by a release that hashed other things.

    Raises:
        BucketingError: If the file is damaged.
    """
    path = Path(folder, LOCK_FILE)
    if not path.is_file():
        return None
    try:
        table = feather.read_table(str(path))
    except pa.ArrowInvalid as error:
        raise BucketingError(
            f"{path} is damaged or cut off ({error}). Copy its folder anew, or remove the file: the rows are then not "
            "compared."
        ) from error
    if (table.schema.metadata or {}).get(_VERSION) != str(RULE_VERSION).encode():
        return None
    return DataLock(**{field.name: table[field.name].to_numpy() for field in fields(DataLock)})


def require_lock(folder: str | os.PathLike[str]) -> DataLock:
    """Return the lock in a prepared folder or in the output folder of a run.

    Raises:
        BucketingError: If there is none that this release can read.
    """
    lock = read_lock(folder)
    if lock is None:
        raise BucketingError(
            f"{folder} holds no {LOCK_FILE} of this release, by which rows are compared. Name a folder that "
            "hf_bucketing prepare or hf_bucketing cache wrote, or the output folder of a run on rows of "
            "one; older folders are to be prepared again."
        )
    return lock


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRule:
    """Make the locks of a data set's rows.

    No file is opened: each is asked for its length and time of modification, and servers for nothing.

    Args:
        files ([`MediaColumns`][hf_bucketing.media.MediaColumns]): Columns that lead to the files.
        caption_column (`str`, *optional*): Column of a text or a list of texts.
        table ([`BucketTable`]): Table of the `bucket_id` column.
        open_table ([`OpenTable`]): Sizes of the rows in packs.
    """

    files: MediaColumns
    caption_column: str | None
    table: BucketTable
    open_table: OpenTable

    def lock(self, dataset: Dataset) -> DataLock:
        """Return the lock of rows. Columns that they lack count as empty."""
        files = (self.files.column, *all_columns(self.files.conditions))
        others = (HAS_AUDIO, REFERENCE_SIZES, CLIP_START, CLIP_END, *SIZE_COLUMNS, "fps", "bucket_id")
        columns = dict.fromkeys([*files, *others, *filter(None, [self.caption_column])])
        present = dataset.select_columns([name for name in columns if name in dataset.column_names])
        kinds = {media_kind(cell_of_list(kind)) for name, kind in present.features.items() if name in files}
        size = _ROWS if kinds <= {"path", None} else _ROWS_WITH_BYTES
        parts: dict[str, list[Hashes]] = {name: [np.zeros(0, np.uint32)] for name in LOCKED}
        parts["name"] = [np.zeros(0, np.uint64)]
        for batch in table_batches(present, present.column_names, size):
            for name, hashes in self._hashes(batch).items():
                parts[name].append(hashes.astype(parts[name][0].dtype))
        return DataLock(**{name: np.concatenate(hashes) for name, hashes in parts.items()})

    def _hashes(self, batch: pa.Table) -> dict[str, Hashes]:
        """Return the hashes of some rows, `uint64` of shape `(n,)` each."""
        nothing = np.zeros(len(batch), np.uint64)
        names, versions = self._files(batch, self.files.column)
        conditions: list[Any] = [nothing]
        for column in all_columns(self.files.conditions):
            conditions.extend(self._files(batch, column) if column in batch.column_names else ())
        if REFERENCE in self.files.conditions:
            conditions.append(np.full(len(batch), repr(self.files.references), object))
        if REFERENCE_SIZES in batch.column_names:
            conditions.append(_as_texts(batch[REFERENCE_SIZES]))
        if self.files.audio is not None:
            conditions += [batch[HAS_AUDIO].to_numpy(), np.full(len(batch), repr(self.files.audio), object)]
        captions = [nothing] if self.caption_column is None else [_as_texts(batch[self.caption_column])]
        return {
            "name": hashed(names),
            "file": hashed(versions),
            "size": hashed(nothing, *self._sizes(batch)),
            "caption": hashed(*captions),
            "conditions": hashed(*conditions),
        }

    def _sizes(self, batch: pa.Table) -> Iterator[npt.NDArray[Any]]:
        """Yield the numbers that decide what part of a file is shown, and at what size."""
        for name in (CLIP_START, CLIP_END, *SIZE_COLUMNS, "fps"):
            if name in batch.column_names:
                yield np.nan_to_num(numbers(batch, name).astype(np.float64), nan=-1)
        if "bucket_id" in batch.column_names:
            yield from sample_sizes(batch["bucket_id"].to_numpy(), self.table).T
        if set(SIZE_COLUMNS) <= {*batch.column_names}:
            largest = self.open_table.spec.size_of(512, 2048, 2048)  # larger samples have no size in packs
            sides = (whole_numbers(batch, name) for name in ("num_frames", "height", "width"))
            cut = [np.minimum(side, most) for side, most in zip(sides, largest, strict=True)]
            yield from sample_sizes(self.open_table.assign(*cut).bucket_id, self.open_table).T

    def _files(self, batch: pa.Table, column: str) -> Sequence[npt.NDArray[Any]]:
        """Return names of the files in a column and what tells their contents apart, texts of shape `(n,)` each."""
        cells = [cell if isinstance(cell, list) else [cell] for cell in batch[column].to_pylist()]
        stretches = [cells[start : start + _FILES_OF_A_THREAD] for start in range(0, len(cells), _FILES_OF_A_THREAD)]
        with ThreadPoolExecutor(_THREADS) as pool:
            described = np.array([pair for pairs in pool.map(self._describe, stretches) for pair in pairs], object)
        return described.reshape(-1, 2).T

    def _describe(self, cells: Sequence[Sequence[Any]]) -> list[tuple[str, str]]:
        """Return the names of the files of each row, and what tells their contents apart."""
        known: dict[str, tuple[str, str]] = {}  # clips of one file follow one another
        described = []
        for files in cells:
            names, versions = [], []
            for file in files:
                if isinstance(file, str) and file not in known:
                    known[file] = self._name_and_version(file)
                name, version = known[file] if isinstance(file, str) else self._name_and_version(file)
                names.append(name)
                versions.append(version)
            described.append(("\0".join(names), "\0".join(versions)))
        return described

    def _name_and_version(self, cell: Any) -> tuple[str, str]:
        """Return the name of a file and what tells its contents apart, `""` for a file that is not there."""
        version = ""
        with suppress(MediaError, OSError):  # of a row that was rejected, or whose file has gone since
            version = str(self.files.source(cell, name="").version(quick=True))
        path = path_of(cell)
        return version if path is None else path, version


def hashed(*columns: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return one hash of each row of numbers or texts, `(n,)` each: equal on all machines and in all releases."""
    total = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        values = column if column.dtype in (object, np.uint64) else column.astype(np.float64)
        total = pd.util.hash_array(total ^ pd.util.hash_array(values, categorize=False))
    return total


def _as_texts(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return cells of texts or numbers, or of lists of them, as one text each."""
    if not is_list_type(column.type):
        return column.cast(pa.string()).to_numpy()
    joined = pc.binary_join(column.cast(pa.list_(pa.string())), "\0")
    return joined.to_numpy()


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
