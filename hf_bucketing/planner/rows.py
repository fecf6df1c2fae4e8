"""What a suggestion knows of a data set: sizes of rows, how long captions are, and how long files take to decode."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray
from ..buckets.sizes import Size
from ..columns.apply import undecoded
from ..columns.arrays import column_array
from ..columns.captions import all_texts
from ..columns.prepared import PreparedDataset
from ..conditions.names import REFERENCE
from ..conditions.rows import ConditionRules, RowConditions
from ..errors import BucketingError, MediaError
from ..media.rows import CLIP_START
from ..media.sample import load
from ..media.views import ViewRule
from ..report.measure import AssignedColumns, Sizes

MOST_ROWS = 100_000
"""Rows on which epochs are planned; of more, as many are taken, evenly spread."""

_CAPTIONS = 256
_FILES = 8
_SECONDS = 10.0
_PIXELS = 2**24
"""Files that are decoded, seconds after which no further one is, and pixels of a file's frames that are decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRows:
    """Rows of a data set, all of them or a sample.

    Attributes:
        sizes ([`Sizes`][hf_bucketing.report.measure.Sizes]): Sizes of the rows, `(n,)` each, negative if unreadable.
        total (`int`, *optional*): Rows of the data set; None for a stream, of which only the first rows are known.
        caption_characters (`float`, *optional*): Mean length of a caption; None if it is not known.
        decoding (`float`, *optional*): Seconds that one process takes for a million pixels of the files' frames; None
            if it was not measured.
        notes (`tuple` of `str`): Sentences on what was sampled or is not known.
        conditions ([`RowConditions`][hf_bucketing.conditions.rows.RowConditions]): Conditions of the rows.
        assigned ([`AssignedColumns`][hf_bucketing.report.measure.AssignedColumns], *optional*): Buckets that the rows
            were prepared with.
        weights (array of `float`, shape `(n,)`, *optional*): Occurrences of each row per epoch; by default once.
    """

    sizes: Sizes
    total: int | None
    conditions: RowConditions
    caption_characters: float | None = None
    decoding: float | None = None
    notes: tuple[str, ...] = ()
    assigned: AssignedColumns | None = None
    weights: FloatArray | None = None

    @property
    def share(self) -> float:
        """Share of the data set that the rows are; 1 for a stream."""
        return len(self.sizes.frames) / self.total if self.total else 1.0

    @classmethod
    def of_prepared(cls, prepared: PreparedDataset) -> DataRows:
        """Return the rows of a data set whose sizes are columns, and decode some of its files.

        Raises:
            BucketingError: If it has no rows.
        """
        total = len(prepared.dataset)
        if not total:
            raise BucketingError("The data set is empty: there is nothing to suggest.")
        rows = np.unique(np.linspace(0, total - 1, min(total, MOST_ROWS)).astype(np.int64))
        notes = []
        if len(rows) < total:
            notes.append(f"Epochs are planned on {len(rows):,} of {total:,} rows, evenly spread.")
        if others := sorted({*prepared.conditions} - {REFERENCE}):
            notes.append(f"Conditions ({', '.join(others)}) are in neither memory nor time.")
        characters = None
        if prepared.caption_column is not None:
            few = prepared.dataset.select(rows[:: max(1, len(rows) // _CAPTIONS)])
            texts = [*all_texts(few, prepared.caption_column)]
            characters = sum(map(len, texts)) / max(len(texts), 1)
        decoding, fault = measure_decoding(prepared)
        names = ("num_frames", "height", "width", "bucket_id", "rejection")
        columns = {
            name: column_array(prepared.dataset, name)[rows]
            for name in names
            if name in prepared.dataset.column_names  # a table of every size gives no buckets
        }
        return cls(
            sizes=_sizes_of(columns),
            total=total,
            caption_characters=characters,
            decoding=decoding,
            notes=(*notes, *([fault] if fault else [])),
            conditions=prepared.row_conditions().select(rows),
            assigned=_assigned_by(columns),
            weights=None if prepared.weights is None else prepared.weights[rows],
        )

    @classmethod
    def of_stream(cls, columns: Mapping[str, npt.NDArray[Any]], *, rules: ConditionRules) -> DataRows:
        """Return the first rows of a stream, by their columns, with conditions by their rules."""
        sizes, assigned = _sizes_of(columns), _assigned_by(columns)
        count = len(sizes.frames)
        note = f"Of the stream, the first {count} rows are known; steps and hours are those of as many rows."
        notes = note, "Decoding is not measured for streams."
        conditions = rules.rows(columns, num_rows=count)
        return cls(sizes=sizes, total=None, conditions=conditions, notes=notes, assigned=assigned)

    @property
    def readable(self) -> npt.NDArray[np.bool_]:
        """Whether each row has a size, `(n,)`."""
        readable: npt.NDArray[np.bool_] = np.minimum.reduce(self.sizes) > 0
        return readable


def _sizes_of(columns: Mapping[str, npt.NDArray[Any]]) -> Sizes:
    return Sizes(*(columns[name].astype(np.int64) for name in ("num_frames", "height", "width")))


def _assigned_by(columns: Mapping[str, npt.NDArray[Any]]) -> AssignedColumns | None:
    """Return the buckets that rows have; None where they have none."""
    return AssignedColumns(columns["bucket_id"], columns["rejection"]) if "bucket_id" in columns else None


def measure_decoding(prepared: PreparedDataset) -> tuple[float | None, str]:
    """Decode the first frames of some samples as training does, at their own size, in this process.

    Args:
        prepared ([`PreparedDataset`][hf_bucketing.columns.PreparedDataset]): Rows with sizes.

    Returns:
        Seconds per million pixels of the files' frames, and what is not known: one of the two is empty.
    """
    sides = [column_array(prepared.dataset, name) for name in ("num_frames", "height", "width")]
    readable = np.flatnonzero(np.minimum.reduce(sides) > 0)
    if not len(readable):
        return None, "Decoding is not measured, as no row has a size."
    chosen = np.unique(np.linspace(0, len(readable) - 1, _FILES).astype(np.int64))
    names = (prepared.column, "num_frames", "fps", "height", "width", CLIP_START)
    columns = [name for name in names if name in prepared.dataset.column_names]
    rows = undecoded(prepared.dataset.select_columns(columns).select(readable[chosen]), [prepared.column])
    views, seconds, pixels = ViewRule(random_crop=False), 0.0, 0
    files = replace(prepared.files, conditions={}, audio=None)
    for row in rows:
        frames, height, width = (int(row[name]) for name in ("num_frames", "height", "width"))
        size = prepared.spec.snap(Size(max(1, min(frames, _PIXELS // (height * width))), height, width))
        try:
            since = time.perf_counter()
            load(files.sample(row, size, views=views, draws=np.zeros(0), name="a row that is decoded to measure it"))
        except MediaError as error:
            return None, f"Decoding is not measured, as a file cannot be read: {error}"
        seconds += time.perf_counter() - since
        pixels += size.frames * height * width
        if seconds > _SECONDS:
            break
    return seconds / pixels * 1e6, ""
