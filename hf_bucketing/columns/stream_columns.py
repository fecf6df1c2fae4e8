"""Columns of the rows of a stream, computed as they come: media, caption, size, bucket and identity."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..buckets.assignment import CAPTION_SIZE
from ..errors import ColumnError
from .buckets import BucketColumns
from .captions import OnCaptionError
from .faults import path_of
from .metadata import ExistingMetadata, MediaMetadata

MEDIA = "media"
"""Column of paths, or of dictionaries of path and bytes."""

CAPTION = "caption"
"""Column of texts."""

_ENDS = 2**16
"""Bytes from each end of a file in memory that its identity depends on."""

_TAR, _KEY = "__url__", "__key__"
"""Columns that datasets' webdataset builder adds: the tar of a row, and its name in it."""

Batch = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamColumns:
    """Make of the rows of a source the columns that training draws; a batch function for `IterableDataset.map`.

    Returns `media`, `caption`, the columns of [`MediaMetadata`] and [`BucketColumns`], and `index`: a number from 0 to
    2**63 - 1 that follows from a row's file and caption alone, so that its noise and crop depend neither on the shard,
    process and worker that read it, nor on the rows before it. Of a file in memory, its name without the folder of its
    tar, its length, and the first and last 64 KiB count.

    Args:
        media_column (`str`): Media column: paths, bytes, or dictionaries of both; dotted if it is nested.
        caption_column (`str`): Text column, such as `"json.caption"`.
        metadata ([`MediaMetadata`]): How sizes are read from the column `media`.
        existing ([`ExistingMetadata`], *optional*): Columns that sizes are taken from instead.
        on_error (`"raise"`, `"reject"` or `"empty"`): Treatment of captions that are not text, as in
            [`check_captions`][hf_bucketing.columns.check_captions].
        conditions (mapping of `str` to `str`): Column of each condition, which becomes a column of its name.
        buckets ([`BucketColumns`]): Table and rule of the buckets.
    """

    media_column: str
    caption_column: str
    metadata: MediaMetadata
    existing: ExistingMetadata | None = None
    on_error: OnCaptionError = "raise"
    conditions: Mapping[str, str] = field(default_factory=dict)
    buckets: BucketColumns
    rule_version: int = field(default=1, init=False)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return the columns for a batch of rows.

        Raises:
            ColumnError: If a column is missing, or a caption is not text under `on_error="raise"`.
            MediaError: If a file cannot be read, unless `metadata.on_error` is `"reject"`.
        """
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        media = [named_cell(value_at(row, self.media_column), row) for row in rows]
        captions = [self._caption(row, cell) for row, cell in zip(rows, media, strict=True)]
        columns = self._sizes(batch, media)
        for position, (_, usable) in enumerate(captions):
            if not usable:
                for name in ("width", "height", "num_frames"):
                    columns[name][position] = CAPTION_SIZE
        assigned: Any = self.buckets(columns)
        texts = [text for text, _ in captions]
        return {
            MEDIA: media,
            CAPTION: texts,
            **{
                name: [named_cell(value_at(row, column), row) for row in rows]
                for name, column in self.conditions.items()
            },
            **columns,
            **{name: values.tolist() for name, values in assigned.items()},
            "index": [index_of(cell, text) for cell, text in zip(media, texts, strict=True)],
        }

    def _caption(self, row: Mapping[str, Any], cell: Any) -> tuple[str, bool]:
        """Return the text of a row, and whether the row may be drawn."""
        text, problem = text_of(value_at(row, self.caption_column))
        if problem is not None and self.on_error == "raise":
            raise ColumnError(
                f"The caption of {name_of(cell)} in the column {self.caption_column!r} is not text, but {problem}.",
                advice=["write it", 'reject such rows with `on_error="reject"`', 'empty it with `on_error="empty"`'],
            )
        return text, problem is None or self.on_error == "empty"

    def _sizes(self, batch: Batch, media: Sequence[Any]) -> dict[str, list[Any]]:
        if self.existing is None:
            return self.metadata({MEDIA: media})
        found = self.existing(batch)
        names = ("width", "height", "num_frames", "fps")
        return {name: found[name].tolist() if name in found else list(batch[name]) for name in names}


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or of a dotted one such as `json.caption`; None where a row has no such value.

    A column whose own name is dotted, such as `depth.png`, comes first.
    """
    if column in row:
        return row[column]
    outer, _, inner = column.partition(".")
    value = row.get(outer)
    return value_at(value, inner) if inner and isinstance(value, Mapping) else None


def text_of(value: Any) -> tuple[str, str | None]:
    """Return a caption as text, `""` if it is none, and what is wrong with it."""
    if isinstance(value, bytes | bytearray):
        try:
            value = bytes(value).decode()
        except UnicodeDecodeError:
            return "", "not UTF-8 text"
    if isinstance(value, str):
        return (value, None) if value.strip() else ("", "empty")
    if value is None:
        return "", "missing"
    if isinstance(value, bool):
        return "", "true or false"
    if isinstance(value, Mapping):
        return "", "a dict"
    return "", "a list" if isinstance(value, Sequence) else "a number"


def name_of(cell: Any) -> str:
    """Return the path of a cell's file, for messages."""
    path = path_of(cell)
    return "a row without a path" if path is None else path


def index_of(cell: Any, caption: str) -> int:
    """Return the identity of a row, from 0 to 2**63 - 1."""
    digest = hashlib.blake2b(digest_size=8)
    data = cell.get("bytes") if isinstance(cell, dict) else None
    parts = [name_of(cell).encode(errors="surrogateescape"), caption.encode(errors="surrogatepass")]
    if data is not None:
        parts += [str(len(data)).encode(), data[:_ENDS], data[-_ENDS:]]
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
