"""Make one data set of the rows of several sources: columns of one name and type, and paths from one root."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, DatasetInfo, Features, List, Value, concatenate_datasets
from datasets.fingerprint import Hasher
from datasets.table import InMemoryTable

from ..buckets.arrays import IntArray
from ..buckets.assignment import REJECTED_BUCKET
from ..buckets.table import BucketTable
from ..conditions.names import MASK, REFERENCE, all_columns, columns_of
from ..conditions.references import REFERENCE_SIZES
from ..errors import ColumnError
from ..media.remote import is_url
from ..media.rows import SOURCE_COLUMN
from ..randomness import ROW
from .apply import with_columns
from .arrays import arrow_type, cell_of_list, column_array, is_list_type, is_text, media_kind
from .sources import MediaDataset

_BYTES = {"bytes": Value("binary"), "path": Value("string")}
"""Type of media of which some are bytes, as `MediaSource.from_cell` reads it; `Video` would make bytes of paths."""

_NOT_RELATIVE = r"^([A-Za-z][A-Za-z0-9+.-]*://|/)"


def merge_sources(sources: Mapping[str, MediaDataset], *, say: Callable[[str], None] = print) -> MediaDataset:
    """Return the rows of all sources, one source after the other.

    Media, captions and conditions get the column names of the first source that has them. Relative paths start from
    the first folder of a source; if some media are bytes, all become `{"bytes": …, "path": …}`. Other columns are kept
    if their types have a common one, with nulls where a source lacks them; the sizes of references are an empty list
    there. Files of references become lists if they are lists in a source. No file's bytes are copied.

    Args:
        sources (mapping of `str` to [`MediaDataset`]): Rows of each source by its name, with size columns.
        say (callable): Called with a sentence about columns that are dropped.

    Raises:
        ColumnError: If the media, captions or conditions of the sources have no common type, or a source lacks a
            condition that others have, other than a mask or references.
    """
    parts = [_renamed(part, _roles(list(sources.values()))) for part in sources.values()]
    first = parts[0]
    roots = _roots_of(parts)
    root = roots[0] if roots else None
    needed = [first.column, *filter(None, [first.caption_column])]
    conditions = _joined_conditions(parts)
    paths_in = {first.column, *all_columns(conditions)}
    check_same_conditions({source: part.conditions for source, part in sources.items()})
    names = dict.fromkeys(name for part in parts for name in part.dataset.column_names if name != ROW)
    features, dropped = Features(), []
    for name in names:
        candidates = [part.dataset.features[name] for part in parts if name in part.dataset.column_names]
        common = _common_media(candidates) if name in paths_in else _common_type(candidates)
        if common is not None:
            features[name] = common
        elif name in paths_in or name in needed:
            types = " and ".join(dict.fromkeys(map(_described, candidates)))
            raise ColumnError(f"The column {name} has different types in the sources: {types}; make them alike.")
        else:
            dropped.append(name)
    if dropped:
        say(f"Columns whose types differ between the sources are dropped: {', '.join(dropped)}.")
    aligned = [_aligned(part, features, paths_in=paths_in, root=root) for part in parts]
    return MediaDataset(
        dataset=concatenate_datasets(aligned),
        column=first.column,
        caption_column=first.caption_column,
        root=root,
        other_roots=roots[1:],
        layout=f"{len(parts)} sources: {', '.join(sources)}",
        conditions=conditions,
        texts=tuple(texts for part in sources.values() for texts in part.texts),
    )


def check_same_conditions(conditions: Mapping[str, Mapping[str, str]]) -> None:
    """Raise ColumnError if a source, by its name, lacks a condition that others have, but for masks and references."""
    for name in {name for columns in conditions.values() for name in columns} - {MASK, REFERENCE}:
        if lacking := [source for source, columns in conditions.items() if name not in columns]:
            raise ColumnError(
                f"The source {lacking[0]} has no {name} column, which others have; give it one, or none to the others."
            )


def _joined_conditions(parts: Sequence[MediaDataset]) -> dict[str, str]:
    """Return the column of each condition of any source, of references those of the source that has most."""
    joined: dict[str, str] = {}
    for part in parts:
        for name, columns in part.conditions.items():
            joined[name] = max(joined.get(name, columns), columns, key=lambda named: named.count(","))
    return joined


def _roles(parts: Sequence[MediaDataset]) -> dict[str, str]:
    """Return the column of each role in the merged data set: `media`, `caption` and the columns of conditions."""
    roles: dict[str, str] = {}
    for part in parts:
        for role, column in _columns_of(part).items():
            roles.setdefault(role, column)
    return roles


def _columns_of(part: MediaDataset) -> dict[str, str]:
    caption = {} if part.caption_column is None else {"caption": part.caption_column}
    conditions = {
        f"condition {name} {number}": column
        for name, columns in part.conditions.items()
        for number, column in enumerate(columns_of(name, columns))
    }
    return {"media": part.column, **caption, **conditions}


def _renamed(part: MediaDataset, roles: Mapping[str, str]) -> MediaDataset:
    """Return a source with the merged names of its columns; what has such a name and another role is dropped."""
    columns = {column: roles[role] for role, column in _columns_of(part).items()}
    in_the_way = [name for name in part.dataset.column_names if name in roles.values() and name not in columns]
    dataset = part.dataset.remove_columns(in_the_way)
    # Names may be exchanged, so each column gets an unused name first.
    aside = {column: f"{column} of a source" for column, name in columns.items() if column != name}
    dataset = dataset.rename_columns(aside).rename_columns({aside[column]: columns[column] for column in aside})
    return MediaDataset(
        dataset=dataset,
        column=columns[part.column],
        caption_column=None if part.caption_column is None else columns[part.caption_column],
        root=part.root,
        layout=part.layout,
        conditions={
            name: ",".join(columns[column] for column in columns_of(name, named))
            for name, named in part.conditions.items()
        },
    )


def _roots_of(parts: Sequence[MediaDataset]) -> tuple[str, ...]:
    """Return the roots of all sources, folders before URLs."""
    return tuple(sorted(dict.fromkeys(part.root for part in parts if part.root is not None), key=is_url))


def _common_media(features: Sequence[Any]) -> Any:
    features = [feature for feature in features if not pa.types.is_null(arrow_type(feature))] or features[:1]
    if any(is_list_type(arrow_type(feature)) for feature in features):
        files = _common_media([cell_of_list(feature) for feature in features])
        return None if files is None else List(files)
    if all(map(is_text, features)) or pa.types.is_null(arrow_type(features[0])):
        return Value("string")
    if any(media_kind(feature) is None for feature in features):
        return None
    return features[0] if all(feature == features[0] for feature in features) else _BYTES


def _common_type(features: Sequence[Any]) -> Any:
    """Return the type that all cells of a column can have, or None."""
    if all(feature == features[0] for feature in features):
        return features[0]
    if all(is_text(feature) or is_text(getattr(feature, "feature", None)) for feature in features):
        return Value("string") if all(map(is_text, features)) else List(Value("string"))
    kinds = {arrow_type(feature) for feature in features if isinstance(feature, Value)} - {pa.null()}
    if not all(isinstance(feature, Value) for feature in features) or not kinds:
        return None
    if len(kinds) == 1:
        return Value(next(feature.dtype for feature in features if arrow_type(feature) in kinds))
    if all(pa.types.is_integer(kind) for kind in kinds):
        return Value("int64")
    if all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in kinds):
        return Value("float64")
    return Value("string") if all(is_text(Value(str(kind))) for kind in kinds) else None


def _described(feature: Any) -> str:
    return feature.dtype if isinstance(feature, Value) else type(feature).__name__


def _aligned(part: MediaDataset, features: Features, *, paths_in: set[str], root: str | None) -> Dataset:
    """Return a source's rows with the merged columns, made of the stored ones without copying their bytes."""
    dataset = part.dataset
    stored, prefix = dataset.data.table, _prefix(part.root, root)
    columns = []
    for name, field in zip(features, features.arrow_schema, strict=True):
        if name not in dataset.column_names:
            empty = pa.nulls(len(stored), field.type)
            columns.append(empty.fill_null([]) if name == REFERENCE_SIZES else empty)
            continue
        cells = stored[name]
        if is_list_type(field.type) and not is_list_type(cells.type):
            cells = pa.chunked_array([_as_lists(chunk) for chunk in cells.chunks], pa.list_(cells.type))
        if name in paths_in:
            kind = media_kind(cell_of_list(dataset.features[name]))
            cells = _media_cells(cells, kind=kind, prefix=prefix, target=field.type)
        columns.append(cells.cast(field.type))
    table = pa.Table.from_arrays(columns, schema=features.arrow_schema)
    return Dataset(
        InMemoryTable(table),
        info=DatasetInfo(features=features),
        indices_table=dataset._indices,
        fingerprint=Hasher.hash([dataset._fingerprint, str(features), prefix]),
    )


def _prefix(source_root: str | None, root: str | None) -> str:
    """Return what a relative path of a source begins with, seen from the merged root."""
    if source_root is None or source_root == root:
        return ""
    if is_url(source_root) or root is None:
        return source_root.rstrip("/") + "/"
    below = os.path.relpath(source_root, root)
    return "" if below == os.curdir else below + "/"


def _media_cells(cells: pa.ChunkedArray, *, kind: str | None, prefix: str, target: pa.DataType) -> pa.ChunkedArray:
    """Return paths from the merged root, or dictionaries with them if the target is a struct, or lists of either."""
    if is_list_type(cells.type):
        target = target.value_type
        lists = [_media_lists(chunk, kind=kind, prefix=prefix, target=target) for chunk in cells.chunks]
        return pa.chunked_array(lists, pa.list_(target))
    if kind is None:
        return cells  # nulls alone
    if kind == "path":
        cells = _prefixed(cells.cast(pa.string()), prefix)
    if not pa.types.is_struct(target) or (cells.type == target and not prefix):
        return cells
    structs = [_as_structs(chunk, kind, prefix) for chunk in cells.chunks]
    return pa.chunked_array(structs, pa.struct(_STORED)).cast(target)


def _media_lists(chunk: pa.Array, *, kind: str | None, prefix: str, target: pa.DataType) -> pa.Array:
    """Return lists of [`_media_cells`]; a missing list is empty."""
    lengths = pc.list_value_length(chunk).fill_null(0).to_numpy(False)
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
    files = _media_cells(pa.chunked_array([chunk.flatten()]), kind=kind, prefix=prefix, target=target)
    return pa.ListArray.from_arrays(offsets, files.cast(target).combine_chunks())


_STORED = [("bytes", pa.binary()), ("path", pa.string())]


def _as_structs(chunk: pa.Array, kind: str | None, prefix: str) -> pa.Array:
    fields = {name: pa.nulls(len(chunk), arrow_type) for name, arrow_type in _STORED}
    if kind == "both":
        fields = {name: pc.struct_field(chunk, name).cast(arrow_type) for name, arrow_type in _STORED}
        paths = fields["path"]  # only names where there are bytes
        fields["path"] = pc.if_else(fields["bytes"].is_valid(), paths, _prefixed(paths, prefix))
    else:
        fields[str(kind)] = chunk.cast(dict(_STORED)[str(kind)])
    missing = pc.is_null(chunk)
    return pa.StructArray.from_arrays(list(fields.values()), names=list(fields), mask=missing)


def _prefixed(cells: pa.ChunkedArray | pa.Array, prefix: str) -> Any:
    """Put a prefix before relative paths."""
    if not prefix:
        return cells
    relative = pc.invert(pc.match_substring_regex(cells, _NOT_RELATIVE))
    return pc.if_else(relative, pc.binary_join_element_wise(prefix, cells, ""), cells)


def _as_lists(chunk: pa.Array) -> pa.Array:
    """Return a list of one cell for each cell."""
    return pa.ListArray.from_arrays(pa.array(range(len(chunk) + 1), pa.int32()), chunk)


def with_sources(
    dataset: Dataset, sources: Mapping[str, MediaDataset], *, table: BucketTable, ids: Sequence[IntArray]
) -> Dataset:
    """Return merged rows with the name of their source, and with the buckets of one table.

    Args:
        dataset (`Dataset`): Rows that `merge_sources` made.
        sources (mapping of `str` to [`MediaDataset`]): The sources.
        table ([`BucketTable`]): Table of all sources.
        ids (sequence of `int64` arrays): Ids in it of the buckets of each source's table.
    """
    lengths = [len(part.dataset) for part in sources.values()]
    buckets = np.split(column_array(dataset, "bucket_id"), np.cumsum(lengths)[:-1])
    # A rejected row's bucket, −1, is the last entry.
    moved = [np.append(new, REJECTED_BUCKET)[old] for new, old in zip(ids, buckets, strict=True)]
    columns = {"bucket_id": np.concatenate(moved), SOURCE_COLUMN: np.repeat(np.arange(len(lengths)), lengths)}
    types = {"bucket_id": Value("int32", id=table.ids_mark), SOURCE_COLUMN: ClassLabel(names=list(sources))}
    return with_columns(dataset, columns, features=Features(types))
