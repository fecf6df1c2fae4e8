"""Load a data set of media files and captions in any of the usual layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset

from ..errors import ColumnError
from .apply import undecoded
from .arrays import column_batches, is_text
from .layouts import Layout, SourceRequest, captions_beside, loaded_by_datasets, metadata_folder, table_file

LAYOUTS: tuple[Layout, ...] = (table_file, metadata_folder, captions_beside, loaded_by_datasets)
"""Layouts in the order in which they are tried; the last one accepts everything, or raises."""

MEDIA_COLUMNS = ("file_name", "video", "video_path", "path", "file_path", "image", "url")
"""Names under which a data set usually holds its media, if it holds no `Image` or `Video` column."""

CAPTION_COLUMNS = ("caption", "text", "prompt", "description")
"""Names under which a data set usually holds its captions."""

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaDataset:
    """Hold rows with a media column, and how they were found.

    Captions are as they were found: [`check_captions`][hf_bucketing.columns.check_captions] makes strings of them.

    Args:
        dataset (`Dataset`): The rows.
        column (`str`): Media column.
        caption_column (`str`, *optional*): Text column; None if there is none.
        root (`str`, *optional*): Folder that relative paths in the media column start from, if there are any.
        layout (`str`): Description of what was read and how many files were ignored, for messages.
        conditions (mapping of `str` to `str`): Column of each condition, such as `{"control": "control_path"}`.
    """

    dataset: Dataset
    column: str
    caption_column: str | None
    root: str | None
    layout: str
    conditions: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Return two lines: the layout that was read, and the columns with the first row as an example."""
        columns = f"media column {self.column}, " + (
            f"caption column {self.caption_column}" if self.caption_column is not None else "no caption column"
        )
        if not len(self.dataset):
            return f"{self.layout}\n{columns}; no rows"
        names = [name for name in (self.column, self.caption_column) if name is not None]
        row = undecoded(self.dataset.select_columns(names), names)[0]
        return f"{self.layout}\n{columns}; row 0: {' · '.join(_shown(row[name]) for name in names)}"


def load_source(
    path_or_name: str,
    *,
    split: str = "train",
    config_name: str | None = None,
    media_column: str | None = None,
    caption_column: str | None = None,
) -> MediaDataset:
    """Load a data set from a file, a folder or the hub, and recognise its layout.

    The layouts, in order of preference:

    - a `.csv`, `.tsv`, `.json`, `.jsonl` or `.parquet` file with a row per sample, and paths relative to its folder;
    - a folder with such a file named `metadata`, for images and videos together;
    - a folder of images and videos, at any depth, with a `.txt` caption of the same stem beside each;
    - any other folder or name on the hub that `datasets.load_dataset` loads.

    Args:
        path_or_name (`str`): A file, a folder, or the name of a data set on the hub.
        split (`str`): Split, such as `"train"` or `"train[:100]"`.
        config_name (`str`, *optional*): Configuration of a hub data set.
        media_column (`str`, *optional*): Media column. By default the only `Image` or `Video` column, otherwise the
            only column named as in `MEDIA_COLUMNS`; in a folder's metadata, `file_name` comes first.
        caption_column (`str`, *optional*): Text column. By default the only column named as in `CAPTION_COLUMNS`, or
            None.

    Raises:
        MediaError: If there is no such file or folder, it holds no rows, datasets cannot load it, or two media files
            share one stem and thereby one caption.
        ColumnError: If a named column does not exist, there is no media column, several columns could be meant, or
            the media are URLs.
    """
    request = SourceRequest(path_or_name=path_or_name, split=split, config_name=config_name)
    rows = next(found for found in (layout(request) for layout in LAYOUTS) if found is not None)
    dataset = rows.dataset
    typed = [name for name, feature in dataset.features.items() if type(feature).__name__ in ("Image", "Video")]
    if media_column is None and rows.media_column in dataset.column_names:
        media_column = rows.media_column
    media = _find_column(path_or_name, dataset, media_column, typed or MEDIA_COLUMNS, kind="media")
    if media is None:
        raise ColumnError(
            f"{path_or_name} has no media column: none of {', '.join(MEDIA_COLUMNS)} is among its columns "
            f"{dataset.column_names}; name the one that holds the files as `media_column`."
        )
    caption = _find_column(path_or_name, dataset, caption_column, CAPTION_COLUMNS, kind="caption")
    holds_paths = is_text(dataset.features[media])
    if holds_paths:
        _refuse_urls(path_or_name, dataset, media)
    return MediaDataset(
        dataset=dataset,
        column=media,
        caption_column=caption,
        root=rows.root if holds_paths else None,
        layout=f"{path_or_name}: {rows.layout}",
    )


def _find_column(name: str, dataset: Dataset, given: str | None, usual: Sequence[str], *, kind: str) -> str | None:
    """Return the column that the caller named, or the only one with a usual name."""
    columns = dataset.column_names
    found = [column for column in usual if column in columns]
    if given is not None:
        if given not in columns:
            hint = f"; {kind}_column {found[0]} would do" if len(found) == 1 else ""
            raise ColumnError(f"{name} has no {kind} column {given!r}, only {columns}{hint}.")
        return given
    if len(found) > 1:
        raise ColumnError(f"{name} has several {kind} columns: {' and '.join(found)}; name one as `{kind}_column`.")
    return found[0] if found else None


def _refuse_urls(name: str, dataset: Dataset, column: str) -> None:
    """Raise for URLs, which are not downloaded; else the error would be about a missing file `folder/https:/…`."""
    for cells in column_batches(dataset, column):
        urls = cells.filter(pc.match_substring_regex(cells, "^[A-Za-z][A-Za-z0-9+.-]+://"))
        if len(urls):
            raise ColumnError(
                f"The column {column} of {name} holds URLs such as {urls[0].as_py()}, which are not downloaded; "
                "download the files, and name a column of their paths as `media_column`."
            )


def _shown(cell: Any) -> str:
    if isinstance(cell, dict) and set(cell) == {"path", "bytes"}:
        cell = cell["path"] or cell["bytes"]
    if isinstance(cell, bytes):
        return f"{len(cell)} bytes"
    text = str(cell) if isinstance(cell, str) else repr(cell)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
