"""Columns of sizes and buckets for parquet files, one file at a time, so that a cluster can share them and resume."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import BucketingError, ColumnError, MediaError
from ..files import PARTIAL, complete_file
from ..media.probe import frames_at_fps
from ..media.remote import below, is_url
from .buckets import BucketColumns
from .metadata import MediaMetadata

_KEY = b"hf_bucketing.input"
"""Entry of the metadata of an output file that says what it was made of."""

_CELLS_AT_ONCE = 100
"""Cells that are taken from Arrow at once, which copies their bytes."""

_TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string)

_MEDIA_TYPES = (pa.int64(), pa.int64(), pa.int64(), pa.float64(), pa.bool_())


class FileResult(NamedTuple):
    """What became of a file.

    Attributes:
        name (`str`): Its path relative to the folder.
        rows (`int`): Rows that were written.
        unreadable (`int`): Those of them whose media cannot be read.
        error (`str`): Why nothing was written, or `""`.
    """

    name: str
    rows: int
    unreadable: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetColumns:
    """Write parquet files anew, with the columns of `MediaMetadata` and `BucketColumns`, to a folder of equal layout.

    A batch function for Ray Data's `map_batches`: a row of its batches is the `name` of a file, and so all work on a
    file happens in one process. An output file appears when it is complete; its metadata says which input and settings
    it was made of, so that [`pending`][ParquetColumns.pending] knows what is left to do. `num_frames` and `fps` are
    those of the media files, which `add_sizes` compares with their headers; buckets are assigned by the frames at
    `target_fps`. Relative paths become absolute ones, as the output lies elsewhere.

    Args:
        source (`str`): Folder of the input files, on storage that all workers reach.
        target (`str`): Folder of the output files.
        metadata ([`MediaMetadata`]): Media column, how headers are read, and the target frame rate.
        buckets ([`BucketColumns`]): Table and rule of the buckets.
        overwrite (`bool`): Whether columns that the files already have are replaced.

    Raises:
        ColumnError: If one of the folders lies in the other.
    """

    source: str
    target: str
    metadata: MediaMetadata
    buckets: BucketColumns
    overwrite: bool = False

    def __post_init__(self) -> None:
        source, target = Path(self.source).resolve(), Path(self.target).resolve()
        if source.is_relative_to(target) or target.is_relative_to(source):
            raise ColumnError(f"{self.target} and {self.source} must be folders apart; choose another one to write.")

    @property
    def output_columns(self) -> tuple[str, ...]:
        """Columns that are added."""
        return (*self.metadata.output_columns, *self.buckets.output_columns)

    def names(self) -> list[str]:
        """Return the paths of the parquet files in the folder, at any depth, relative to it.

        Raises:
            MediaError: If there is none.
        """
        folder = Path(self.source)
        files = (path.relative_to(folder) for path in folder.rglob("*.parquet"))
        names = sorted(str(path) for path in files if not any(part.startswith(".") for part in path.parts))
        if not names:
            raise MediaError(f"{folder} holds no parquet file; name a folder of parquet files.")
        return names

    def pending(self) -> list[str]:
        """Return the names of the files without an output of their present contents and these settings.

        Raises:
            ColumnError: If one of them lacks the media column, or has a column that would be replaced.
            MediaError: If there is no file, one of them is not a parquet file, or the input of an output is gone.
        """
        names = self.names()
        folder = Path(self.target)
        if alone := sorted({str(path.relative_to(folder)) for path in folder.rglob("[!.]*.parquet")} - {*names}):
            raise MediaError(
                f"{folder} holds {len(alone)} files that {self.source} does not have (any more), such as {alone[0]}, "
                "and whose rows would be read too; delete them, or choose another folder."
            )
        names = [name for name in names if not self._is_done(name)]
        for name in names:
            self._check(name)
        return names

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Write the output of each file of the batch; return the fields of its [`FileResult`] as columns.

        An error is returned, because Ray would wrap it in its own.
        """
        results = [self._result(str(name)) for name in batch["name"]]
        return {field: np.array([getattr(result, field) for result in results]) for field in FileResult._fields}

    def write(self, name: str) -> FileResult:
        """Write the output of a file.

        Raises:
            MediaError: Under `on_error="raise"`, for the first unreadable media; the message names file and rows.
            WriteError: If the output cannot be written.
        """
        made_of = {_KEY: self._made_of(name).encode()}
        rows = unreadable = 0
        with complete_file(Path(self.target) / name, shared=True) as partial, self._open(name) as file:
            schema = self._schema(file.schema_arrow)
            schema = schema.with_metadata({**(schema.metadata or {}), **made_of})
            with pq.ParquetWriter(partial, schema) as writer:
                for group in range(file.num_row_groups):
                    table = self._with_columns(file.read_row_group(group), schema, name=name, start=rows)
                    writer.write_table(table)
                    rows += len(table)
                    unreadable += int((table["width"].to_numpy() < 0).sum())
        return FileResult(name, rows, unreadable, "")

    def _result(self, name: str) -> FileResult:
        try:
            return self.write(name)
        except BucketingError as error:
            return FileResult(name, 0, 0, str(error))

    def _with_columns(self, table: pa.Table, schema: pa.Schema, *, name: str, start: int) -> pa.Table:
        """Return rows of a file, from row `start` on, with the columns of the output."""
        column = self.metadata.column
        media: dict[str, list[Any]] = {output: [] for output in self.metadata.output_columns}
        for first in range(0, len(table), _CELLS_AT_ONCE):
            cells = table[column].slice(first, _CELLS_AT_ONCE).to_pylist()
            try:
                read = replace(self.metadata, target_fps=None)({column: cells})
            except MediaError as error:
                rows = f"rows {start + first} to {start + first + len(cells) - 1}"
                raise MediaError(f"{name}, {rows}: {error.fact}", advice=error.advice) from error
            for output, values in read.items():
                media[output] += values
        frames, _ = frames_at_fps(media["num_frames"], media["fps"], self.metadata.target_fps)
        buckets = self.buckets({"width": media["width"], "height": media["height"], "num_frames": frames})
        columns = {kept: table[kept] for kept in table.column_names} | {**media, **buckets}
        if self.metadata.root is not None:
            columns[column] = pa.chunked_array(map(self._absolute, table[column].chunks), table[column].type)
        return pa.table({output: columns[output] for output in schema.names}, schema=schema)

    def _absolute(self, cells: pa.Array) -> pa.Array:
        """Return cells with absolute paths; those of embedded bytes are names and stay as they are."""
        if any(test(cells.type) for test in _TEXT_TYPES):
            return pa.array([self._below_root(path) for path in cells.to_pylist()], cells.type)
        if not pa.types.is_struct(cells.type) or cells.type.get_field_index("path") < 0:
            return cells
        fields = {field.name: cells.field(field.name) for field in cells.type}
        embedded = fields["bytes"].is_valid() if "bytes" in fields else False
        fields["path"] = pc.if_else(embedded, fields["path"], self._absolute(fields["path"]))
        return pa.StructArray.from_arrays([*fields.values()], fields=[*cells.type], mask=cells.is_null())

    def _below_root(self, path: str | None) -> str | None:
        """Return an absolute path; one that leaves the root stays relative, and is refused when it is read."""
        if path is None or is_url(path) or os.path.normpath(path).split(os.sep)[0] == os.pardir:
            return path
        root = str(self.metadata.root)
        return below(root if is_url(root) else os.path.abspath(root), path)

    def _schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the schema of the output."""
        added = dict(zip(self.metadata.output_columns, _MEDIA_TYPES, strict=True))
        added |= {field.name: field.type for field in self.buckets.features.arrow_schema}
        kept = [field for field in schema if field.name not in added]
        return pa.schema([*kept, *(pa.field(name, kind) for name, kind in added.items())], schema.metadata)

    def _check(self, name: str) -> None:
        with self._open(name) as file:
            columns = file.schema_arrow.names
        if self.metadata.column not in columns:
            raise ColumnError(f"{name} has no media column {self.metadata.column!r}, only {columns}.")
        present = [column for column in self.output_columns if column in columns]
        if present and not self.overwrite:
            raise ColumnError(
                f"{name} already has {present}, which would be replaced.",
                advice=["pass `overwrite=True`", "remove or rename them"],
            )

    def _open(self, name: str) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(Path(self.source) / name)
        except (pa.ArrowInvalid, OSError) as error:
            raise MediaError(f"{Path(self.source) / name} cannot be read as parquet: {error}") from error

    def _is_done(self, name: str) -> bool:
        target = Path(self.target) / name
        if not target.is_file():
            return False
        return (pq.read_schema(target).metadata or {}).get(_KEY) == self._made_of(name).encode()

    def _made_of(self, name: str) -> str:
        """Return what decides the output of a file: its size and time of change, and the settings."""
        status = (Path(self.source) / name).stat()
        settings = hashlib.sha256(repr((self.metadata, self.buckets)).encode()).hexdigest()
        return json.dumps({"bytes": status.st_size, "changed_ns": status.st_mtime_ns, "settings": settings})


def remove_partial(folder: Path) -> None:
    """Delete what killed processes left of unfinished files in a folder; call it while no other writes there."""
    for path in folder.rglob(f".*.parquet.*{PARTIAL}"):
        path.unlink()
