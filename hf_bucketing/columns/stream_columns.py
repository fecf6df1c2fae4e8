"""Columns of the rows of a stream, computed as they come: media, caption, size, bucket and identity."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ColumnError
from ..media.rows import CLIP_END, CLIP_START
from .buckets import BucketColumns
from .captions import CaptionTexts, for_source
from .clips import SCENE_END, SCENE_START, ClipRows
from .conditions import CONDITION_FAULT, ConditionColumns
from .faults import NAMED_ROWS, OF_BATCH, Faults, Report, listed, path_of
from .metadata import ExistingMetadata, MediaMetadata

MEDIA = "media"
"""Column of paths, or of dictionaries of path and bytes."""

CAPTION = "caption"
"""Column of texts, or of lists of texts."""

_ENDS = 2**16
"""Bytes from each end of a file in memory that its identity depends on."""

_TAR, _KEY = "__url__", "__key__"
"""Columns that datasets' webdataset builder adds: the tar of a row, and its name in it."""

Batch = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamColumns:
    """Make of the rows of a source the columns that training draws; a batch function for `IterableDataset.map`.

    Returns `media`, `caption`, the columns of conditions, [`MediaMetadata`] and [`BucketColumns`], and `index`: a
    number from 0 to 2**63 - 1 that follows from a row's file, captions and clip alone, so that its noise and crop
    depend neither on the shard, process and worker that read it, nor on the rows before it. Of a file in memory, its
    name without the folder of its tar, its length, and the first and last 64 KiB count. Rows that are cut into clips
    become one row each.

    Args:
        media_column (`str`): Media column: paths, bytes, or dictionaries of both; dotted if it is nested.
        captions ([`CaptionTexts`]): Text columns, dotted if they are nested, and how texts are made of them.
        metadata ([`MediaMetadata`]): How sizes are read from the column `media`.
        existing ([`ExistingMetadata`], *optional*): Columns that sizes are taken from instead, dotted if nested.
        clips ([`ClipRows`], *optional*): How rows are cut into clips.
        conditions (mapping of `str` to `str`): Column of each condition, which becomes a column of its name.
        check ([`ConditionColumns`]): How the conditions are checked.
        buckets ([`BucketColumns`]): Table and rule of the buckets.
    """

    media_column: str
    captions: CaptionTexts
    metadata: MediaMetadata
    existing: ExistingMetadata | None = None
    clips: ClipRows | None = None
    conditions: Mapping[str, str]
    check: ConditionColumns
    buckets: BucketColumns
    rule_version: int = field(default=2, init=False)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return the columns for a batch of rows.

        Raises:
            ColumnError: If a column is missing, or, under `on_error="raise"`, a caption is not text, a size is missing
                or a clip does not lie in its file.
            MediaError: If a file cannot be read or a condition does not fit, unless `on_error` is `"reject"`.
            RowsError: If several of these are so.
        """
        with Faults() as faults:
            return self._columns(batch, faults)

    def _columns(self, batch: Batch, faults: Faults) -> dict[str, Any]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        columns: dict[str, Any] = {MEDIA: _cells(rows, self.media_column)}
        columns |= {name: _cells(rows, column) for name, column in self.conditions.items()}
        columns |= self._sizes(rows, columns[MEDIA], faults.report)
        texts = {name: [value_at(row, name) for row in rows] for name in self.captions.columns}
        columns |= self.captions({**columns, **texts}, lambda error: faults.report(for_source(error)))
        columns[CAPTION] = columns.pop(self.captions.columns[0])
        if self.clips is not None:
            scenes = {name: [value_at(row, name) for row in rows] for name in (SCENE_START, SCENE_END)}
            columns = self.clips({**columns, **scenes}, faults.report)
            del columns[SCENE_START], columns[SCENE_END]
        columns |= self.check(columns, faults.report)
        del columns[CONDITION_FAULT]
        assigned: Any = self.buckets(columns)
        count = len(columns[MEDIA])
        times = zip(columns.get(CLIP_START, [None] * count), columns.get(CLIP_END, [None] * count), strict=True)
        index = map(index_of, columns[MEDIA], columns[CAPTION], times)
        return {**columns, **{name: values.tolist() for name, values in assigned.items()}, "index": list(index)}

    def _sizes(self, rows: Sequence[Mapping[str, Any]], media: Sequence[Any], report: Report) -> dict[str, list[Any]]:
        if self.existing is None:
            return self.metadata({MEDIA: media}, report)
        given = {name: [value_at(row, name) for row in rows] for name in self.existing.input_columns}
        found = self.existing(given)
        names = ("width", "height", "num_frames", "fps")
        sizes = {name: found[name].tolist() if name in found else given[name] for name in names}
        lacking = [
            row
            for row, size in enumerate(zip(*(sizes[name] for name in names[:3]), strict=True))
            if min(-1 if side is None else side for side in size) < 1
        ]
        if lacking and self.metadata.on_error == "raise":
            texts = [
                f"row {row} ({name_of(media[row])}) has "
                + ", ".join(f"{name} {values[row]}" for name, values in given.items())
                for row in lacking[:NAMED_ROWS]
            ]
            report(
                ColumnError(
                    f"{len(lacking)} of {len(media)} rows lack a size: {listed(texts, total=len(lacking))}.{OF_BATCH}",
                    advice=["correct the columns", 'reject such rows with `on_error="reject"`'],
                )
            )
        for name in names[:3]:
            for row in lacking:
                sizes[name][row] = -1
        return sizes


def _cells(rows: Sequence[Mapping[str, Any]], column: str) -> list[Any]:
    return [named_cell(value_at(row, column), row) for row in rows]


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or of a dotted one such as `json.caption`; None where a row has no such value.

    A column whose own name is dotted, such as `depth.png`, comes first.
    """
    if column in row:
        return row[column]
    outer, _, inner = column.partition(".")
    value = row.get(outer)
    return value_at(value, inner) if inner and isinstance(value, Mapping) else None


def name_of(cell: Any) -> str:
    """Return the path of a cell's file, for messages."""
    return path_of(cell) or "a row without a path"


def index_of(cell: Any, captions: str | Sequence[str], times: tuple[float | None, float | None]) -> int:
    """Return the identity of a row, from 0 to 2**63 - 1; `times` are the seconds of a clip, None for a whole file."""
    digest = hashlib.blake2b(digest_size=8)
    data = cell.get("bytes") if isinstance(cell, dict) else None
    texts = [captions] if isinstance(captions, str) else captions
    parts = [name_of(cell).encode(errors="surrogateescape"), *(text.encode(errors="surrogatepass") for text in texts)]
    if data is not None:
        parts += [str(len(data)).encode(), data[:_ENDS], data[-_ENDS:]]
    parts += [str(time).encode() for time in times if time is not None]
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return int.from_bytes(digest.digest(), "big") >> 1


def named_cell(cell: Any, row: Mapping[str, Any]) -> Any:
    """Return a cell whose bytes, if it has any, are named by their tar and key, or by their path."""
    data = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(data, bytes | bytearray):
        return cell.get("path") if isinstance(cell, dict) else cell
    path = cell.get("path") if isinstance(cell, dict) else None
    tar = os.path.basename(str(row[_TAR])) if row.get(_TAR) else None
    parts = [part for part in (tar, path or row.get(_KEY)) if part]
    return {"path": "/".join(parts) or None, "bytes": data}
