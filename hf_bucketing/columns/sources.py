"""Load a data set of media files and captions in any of the usual layouts, as rows or as a stream."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import pyarrow as pa
from datasets import Dataset, IterableDataset
from datasets.exceptions import DatasetsError

from ..errors import ColumnError, MediaError
from ..randomness import COLUMN_PREFIX
from .apply import undecoded
from .layouts import (
    MEDIA_COLUMNS,
    MEDIA_FILES,
    SourceRequest,
    SourceRows,
    TextFiles,
    last_part,
    loaded_by_datasets,
    usual_captions,
    usual_media,
)
from .nested import has_column, nested_names, with_nested
from .settings import MediaKind
from .tables import LAYOUTS

SAMPLED_ROWS = 64
"""Rows of a stream that are read to find its columns and to check it."""

_SAMPLED_BYTES = 2**28
"""Bytes after which no more of them are read."""

_PRINTED_CHARACTERS = 80

_TAR, _KEY = "__url__", "__key__"
"""Columns that datasets' webdataset builder adds: the tar of a row, and its name in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaDataset:
    """Hold rows with a media column, and how they were found.

    Captions are as they were found: [`check_captions`][hf_bucketing.columns.check_captions] makes strings of them.

    Args:
        dataset (`Dataset` or `IterableDataset`): The rows, or a stream of them with media as paths or bytes.
        column (`str`): Media column.
        caption_column (`str`, *optional*): Text column; None if there is none.
        root (`str`, *optional*): Folder or URL that relative paths in the media column start from, if there are any.
        other_roots (`tuple` of `str`): Folders and URLs of the other sources, if several were merged.
        layout (`str`): Description of what was read and how many files were ignored, for messages.
        conditions (mapping of `str` to `str`): Column of each condition, such as `{"control": "control_path"}`.
        first_rows (`Dataset`, *optional*): First rows of a stream; None for a data set of rows.
        texts (`tuple` of [`TextFiles`][hf_bucketing.columns.layouts.TextFiles]): Local files with the captions of
            each source.
    """

    dataset: Any
    column: str
    caption_column: str | None
    root: str | None
    other_roots: tuple[str, ...] = ()
    layout: str
    conditions: Mapping[str, str] = field(default_factory=dict)
    first_rows: Dataset | None = None
    texts: tuple[TextFiles, ...] = ()

    def describe(self) -> str:
        """Return two lines: the layout that was read, and the columns with the first row as an example."""
        columns = f"media column {self.column}, " + (
            f"caption column {self.caption_column}" if self.caption_column is not None else "no caption column"
        )
        rows: Dataset = self.dataset if self.first_rows is None else self.first_rows
        if not len(rows):
            return f"{self.layout}\n{columns}; no rows"
        names = [name for name in (self.column, self.caption_column) if name is not None]
        row = undecoded(rows.select_columns(names), names)[0]
        return f"{self.layout}\n{columns}; row 0: {' · '.join(_printed(row[name]) for name in names)}"


def load_source(
    path_or_name: str,
    *,
    split: str = "train",
    config_name: str | None = None,
    media_column: str | None = None,
    caption_column: str | None = None,
    caption_extension: str | None = None,
    missing_caption: str | None = None,
    companions: Mapping[str, str | Sequence[str]] | None = None,
    media_kind: MediaKind = "all",
    streaming: bool = False,
) -> MediaDataset:
    """Load a data set from a file, a folder, a URL or the hub, and recognise its layout.

    The layouts:

    - a `.csv`, `.tsv`, `.json`, `.jsonl` or `.parquet` file with a row per sample, and paths relative to its folder,
      named directly (also at a URL that fsspec opens), or as the `metadata` of a folder, or as the only table in it
      that lists its files; FastVideo's `videos2caption.json`;
    - several such files of one kind, by a pattern such as `parts/*.parquet`;
    - tars of webdataset: one, a pattern such as `shards/*.tar`, or a folder of them;
    - a folder with a list of files and a list of captions, line by line, such as `videos.txt` and `prompts.txt`;
    - a folder whose `captions.json` maps the name of each file to its caption or captions;
    - a folder of images and videos, at any depth, with a caption file of the same stem beside each;
    - any other folder or name on the hub that `datasets.load_dataset` loads.

    A column may lie in another one: `json.caption` is the `caption` of the dicts in the column `json`, and becomes a
    column of that name.

    Args:
        path_or_name (`str`): A file, a folder, a URL, or the name of a data set on the hub.
        split (`str`): Split, such as `"train"` or `"train[:100]"`.
        config_name (`str`, *optional*): Configuration of a hub data set.
        media_column (`str`, *optional*): Media column, of paths, URLs or bytes. By default the only `Image` or `Video`
            column, otherwise the only column named as in `MEDIA_COLUMNS`; in a folder's metadata, `file_name` comes
            first.
        caption_column (`str`, *optional*): Text column. By default the only column named as in `CAPTION_COLUMNS`, or
            the only such name in a column of dicts, or None.
        caption_extension (`str`, *optional*): Ending of the caption files beside media, by default `.txt`. Giving it
            also chooses this layout where another could be meant.
        missing_caption (`str`, *optional*): Caption of media without a caption file, in that layout.
        companions (mapping of `str` to `str` or `list` of `str`, *optional*): Folder, for each column to add, of
            files that have the stems of the media, such as `{"control": "clips/control"}`; of the column `reference`
            one or several folders, whose files may also have these stems and a number, as `clip_0.png`. For the
            layout of caption files beside media.
        media_kind (`"all"`, `"images"` or `"videos"`): Kind of files, by their endings, that are media in that layout.
        streaming (`bool`): Whether the rows are a stream, an `IterableDataset`, which is read while it is used. Its
            columns are found by its first rows.

    Raises:
        MediaError: If there is no such file or folder, it holds no rows, datasets cannot load it, two layouts could be
            meant, lists of files and captions differ in length, two media files share one stem and thereby one
            caption, or the rows of a stream's `split` cannot be counted from its beginning in one file.
        ColumnError: If a named column does not exist, there is no media column, several columns could be meant, or
            captions are dicts.
    """
    return load_rows(
        SourceRequest(
            path_or_name=path_or_name,
            split=split,
            config_name=config_name,
            media_column=media_column,
            caption_column=caption_column,
            caption_extension=caption_extension,
            missing_caption=missing_caption,
            companions={
                name: [folders] if isinstance(folders, str) else folders
                for name, folders in (companions or {}).items()
            },
            media_kind=media_kind,
            streaming=streaming,
        )
    )


def load_rows(request: SourceRequest) -> MediaDataset:
    """Load the data set that a request describes, as [`load_source`] does.

    Raises:
        MediaError: As [`load_source`].
        ColumnError: As [`load_source`].
    """
    name, rows = request.path_or_name, find_rows(request)
    sample = rows_to_check(rows.dataset, name=name)
    if ours := [column for column in sample.column_names if column.startswith(COLUMN_PREFIX)]:
        raise ColumnError(
            f"{name} has the columns {', '.join(ours)}, but preparing makes columns of such names; remove "
            "them, or give `ignore_columns`."
        )
    typed = [name for name, feature in sample.features.items() if type(feature).__name__ in ("Image", "Video")]
    media_column = request.media_column
    if media_column is None and rows.media_column in sample.column_names:
        media_column = rows.media_column
    usual = usual_media(nested_names(sample), typed=typed)
    media = _find_column(name, sample, media_column, usual, kind="media")
    if media is None:
        raise ColumnError(
            f"{name} has no media column: none of {', '.join(MEDIA_COLUMNS)} is among its columns "
            f"{nested_names(sample)}; name the one that holds the files as `media_column`."
        )
    caption = _caption_column(name, sample, request.caption_column)
    columns = [column for column in (media, caption) if column is not None]
    return MediaDataset(
        dataset=with_nested(rows.dataset, columns),
        column=media,
        caption_column=caption,
        root=rows.root,
        layout=f"{name}: {rows.layout}",
        first_rows=with_nested(sample, columns) if request.streaming else None,
        texts=(rows.texts,),
    )


def find_rows(request: SourceRequest) -> SourceRows:
    """Return the rows, or the stream, of the one layout that is meant: the recogniser of all sources.

    Raises:
        MediaError: As [`load_source`].
        ColumnError: If a column that is to be ignored does not exist.
    """
    rows = _recognised(request)
    if not request.ignored:
        return rows
    names = rows_to_check(rows.dataset, name=request.path_or_name).column_names
    if missing := [name for name in request.ignored if name not in names]:
        raise ColumnError(f"{request.path_or_name} has no {', '.join(missing)} to ignore, only {names}.")
    return replace(rows, dataset=rows.dataset.remove_columns([*request.ignored]))


def _recognised(request: SourceRequest) -> SourceRows:
    """Return the rows of the one layout that is meant, with all their columns."""
    matches = [rows for layout in LAYOUTS if (rows := layout(request)) is not None]
    if not matches:
        return loaded_by_datasets(request)
    if len(matches) == 1:
        return matches[0]
    samples = [rows_to_check(rows.dataset, name=request.path_or_name) for rows in matches]
    captioned = [
        rows for rows, sample in zip(matches, samples, strict=True) if _captions_of(sample, request.caption_column)
    ]
    if len(captioned) == 1:
        others = " and ".join(rows.layout for rows in matches if rows is not captioned[0])
        return replace(captioned[0], layout=f"{captioned[0].layout} (not used, for lack of such captions: {others})")
    raise MediaError(
        f"{request.path_or_name} could be read in {len(matches)} ways: "
        f"{'; or '.join(rows.layout for rows in matches)}.",
        advice=[rows.choose for rows in matches],
    )


def rows_to_check(dataset: Dataset | IterableDataset, *, name: str) -> Dataset:
    """Return a data set of rows unchanged, or the first rows of a stream, with media as paths or bytes.

    Args:
        dataset (`Dataset` or `IterableDataset`): Rows of a layout.
        name (`str`): What was read, for messages.

    Raises:
        MediaError: If a stream has no rows, or datasets cannot read them.
    """
    if isinstance(dataset, Dataset):
        return dataset
    rows: list[dict[str, Any]] = []
    num_bytes = 0
    try:
        for row in islice(dataset, SAMPLED_ROWS):
            rows.append({name: named_cell(cell, row) if _is_file(cell) else cell for name, cell in row.items()})
            num_bytes += bytes_in(row)
            if num_bytes > _SAMPLED_BYTES:
                break
    except (DatasetsError, OSError, ValueError) as error:
        raise MediaError(f"datasets cannot read the first rows of {name}: {error}") from error
    if not rows:
        raise MediaError(f"{name} has no rows; write one per sample, with a file and a caption.")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    if dataset.features is not None:
        return Dataset.from_dict(columns, features=dataset.features)
    try:
        return Dataset.from_dict(columns)
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # cells of several types, which datasets 4.7 and newer hold as JSON
        return Dataset.from_dict(columns, on_mixed_types="use_json")


def named_cell(cell: Any, row: Mapping[str, Any]) -> Any:
    """Return a cell whose bytes, if it has any, are named by their tar and key, or by their path."""
    data = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(data, bytes | bytearray):
        return cell.get("path") if isinstance(cell, dict) else cell
    path = cell.get("path") if isinstance(cell, dict) else None
    tar = os.path.basename(str(row[_TAR])) if row.get(_TAR) else None
    parts = [part for part in (tar, path or row.get(_KEY)) if part]
    return {"path": "/".join(parts) or None, "bytes": data}


def _is_file(cell: Any) -> bool:
    return isinstance(cell, dict) and set(cell) == {"path", "bytes"}


def bytes_in(row: Mapping[str, Any]) -> int:
    """Return how many bytes the files and texts of a row take in memory."""
    cells = (value.get("bytes") if isinstance(value, Mapping) else value for value in row.values())
    return sum(len(cell) for cell in cells if isinstance(cell, bytes | str))


def _captions_of(dataset: Dataset, column: str | None) -> list[str]:
    """Return the columns that the caller named, or that are usually captions, also those within columns of dicts."""
    if column is not None:
        return [column] if has_column(dataset, column) else []
    return usual_captions(nested_names(dataset))


def _caption_column(name: str, dataset: Dataset, named: str | None) -> str | None:
    """Return the caption column, which may lie in a column of dicts.

    Raises:
        ColumnError: If it does not exist, several could be meant, or its captions are dicts.
    """
    usual = [column for column in _captions_of(dataset, None) if not nested_names(dataset, within=column)]
    column = _find_column(name, dataset, named, usual, kind="caption")
    inner = nested_names(dataset, within=column) if column is not None else []
    if inner:
        raise ColumnError(
            f"The caption column {column!r} of {name} holds dicts; name the one of their texts that is the caption as "
            f"`caption_column`: {', '.join(inner)}."
        )
    return column


def _find_column(name: str, dataset: Dataset, named: str | None, usual: Sequence[str], *, kind: str) -> str | None:
    """Return the column that the caller named, or the only one with a usual name; None if there is none.

    Raises:
        ColumnError: If the named column does not exist, or several could be meant.
    """
    if named is not None:
        if has_column(dataset, named):
            return named
        hint = f"; {kind}_column {usual[0]} would do" if len(usual) == 1 else ""
        raise ColumnError(f"{name} has no {kind} column {named!r}, only {nested_names(dataset)}{hint}.")
    if len(usual) > 1:
        dots = kind == "media" and all("." + last_part(column) in MEDIA_FILES and "." in column for column in usual)
        hint = "; in tars the name of a sample ends at its first dot, so rename files with more dots" if dots else ""
        raise ColumnError(
            f"{name} has several {kind} columns: {' and '.join(usual)}; name one as `{kind}_column`{hint}."
        )
    return usual[0] if usual else None


def _printed(cell: Any) -> str:
    if _is_file(cell):
        cell = cell["path"] or cell["bytes"]
    if isinstance(cell, bytes):
        return f"{len(cell)} bytes"
    text = str(cell) if isinstance(cell, str) else repr(cell)
    return text if len(text) <= _PRINTED_CHARACTERS else f"{text[: _PRINTED_CHARACTERS - 1]}…"
