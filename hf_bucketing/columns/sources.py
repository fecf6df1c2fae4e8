"""Load a data set of media files and captions in any of the usual layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset

from ..errors import ColumnError, MediaError
from .apply import undecoded
from .beside import captions_beside
from .layouts import (
    MEDIA_COLUMNS,
    Layout,
    SourceRequest,
    SourceRows,
    choose_column,
    loaded_by_datasets,
    usual_captions,
    usual_media,
)
from .nested import has_column, nested_column, nested_names
from .tables import lines_folder, listed_folder, mapped_folder, named_file, tars

LAYOUTS: tuple[Layout, ...] = (named_file, tars, listed_folder, mapped_folder, lines_folder, captions_beside)
"""Layouts that are recognised; everything else is left to `datasets.load_dataset`."""

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaDataset:
    """Hold rows with a media column, and how they were found.

    Captions are as they were found: [`check_captions`][hf_bucketing.columns.check_captions] makes strings of them.

    Args:
        dataset (`Dataset`): The rows.
        column (`str`): Media column.
        caption_column (`str`, *optional*): Text column; None if there is none.
        root (`str`, *optional*): Folder or URL that relative paths in the media column start from, if there are any.
        other_roots (`tuple` of `str`): Folders and URLs of the other sources, if several were merged.
        layout (`str`): Description of what was read and how many files were ignored, for messages.
        conditions (mapping of `str` to `str`): Column of each condition, such as `{"control": "control_path"}`.
    """

    dataset: Dataset
    column: str
    caption_column: str | None
    root: str | None
    other_roots: tuple[str, ...] = ()
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
    caption_extension: str | None = None,
    missing_caption: str | None = None,
    companions: Mapping[str, str] | None = None,
) -> MediaDataset:
    """Load a data set from a file, a folder, a URL or the hub, and recognise its layout.

    The layouts:

    - a `.csv`, `.tsv`, `.json`, `.jsonl` or `.parquet` file with a row per sample, and paths relative to its folder,
      named directly (also at a URL that fsspec opens), or as the `metadata` of a folder, or as the only table in it
      that lists its files; FastVideo's `videos2caption.json`;
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
        companions (mapping of `str` to `str`, *optional*): Folder, for each column to add, of files that have the
            stems of the media, such as `{"control": "clips/control"}`; for the layout of caption files beside media.

    Raises:
        MediaError: If there is no such file or folder, it holds no rows, datasets cannot load it, two layouts could be
            meant, lists of files and captions differ in length, or two media files share one stem and thereby one
            caption.
        ColumnError: If a named column does not exist, there is no media column, several columns could be meant, or
            captions are dicts.
    """
    request = SourceRequest(
        path_or_name=path_or_name,
        split=split,
        config_name=config_name,
        media_column=media_column,
        caption_column=caption_column,
        caption_extension=caption_extension,
        missing_caption=missing_caption,
        companions=companions or {},
    )
    rows = _chosen(request, [rows for layout in LAYOUTS if (rows := layout(request)) is not None])
    dataset = rows.dataset
    typed = [name for name, feature in dataset.features.items() if type(feature).__name__ in ("Image", "Video")]
    if media_column is None and rows.media_column in dataset.column_names:
        media_column = rows.media_column
    usual = usual_media(nested_names(dataset), typed=typed)
    media = _find_column(path_or_name, dataset, media_column, usual, kind="media")
    if media is None:
        raise ColumnError(
            f"{path_or_name} has no media column: none of {', '.join(MEDIA_COLUMNS)} is among its columns "
            f"{nested_names(dataset)}; name the one that holds the files as `media_column`."
        )
    caption = _caption_column(path_or_name, dataset, caption_column)
    for name in (media, caption):
        if name is not None and name not in dataset.column_names:
            dataset = nested_column(dataset, name)
    return MediaDataset(
        dataset=dataset,
        column=media,
        caption_column=caption,
        root=rows.root,
        layout=f"{path_or_name}: {rows.layout}",
    )


def _chosen(request: SourceRequest, found: list[SourceRows]) -> SourceRows:
    """Return the only layout that was found, or the only one of them that has captions."""
    if not found:
        return loaded_by_datasets(request)
    if len(found) == 1:
        return found[0]
    captioned = [rows for rows in found if _captions_of(rows.dataset, request.caption_column)]
    if len(captioned) == 1:
        others = " and ".join(rows.layout for rows in found if rows is not captioned[0])
        return replace(captioned[0], layout=f"{captioned[0].layout} (not used, for lack of such captions: {others})")
    raise MediaError(
        f"{request.path_or_name} could be read in {len(found)} ways: {'; or '.join(rows.layout for rows in found)}.",
        advice=[rows.choose for rows in found],
    )


def _captions_of(dataset: Dataset, given: str | None) -> list[str]:
    """Return the columns that the caller named, or that are usually captions, also those within columns of dicts."""
    if given is not None:
        return [given] if has_column(dataset, given) else []
    return usual_captions(nested_names(dataset))


def _caption_column(name: str, dataset: Dataset, given: str | None) -> str | None:
    """Return the caption column, which may lie in a column of dicts.

    Raises:
        ColumnError: If it does not exist, several could be meant, or its captions are dicts.
    """
    usual = [found for found in _captions_of(dataset, None) if not nested_names(dataset, within=found)]
    column = _find_column(name, dataset, given, usual, kind="caption")
    inner = nested_names(dataset, within=column) if column is not None else []
    if inner:
        raise ColumnError(
            f"The caption column {column!r} of {name} holds dicts; name the one of their texts that is the caption as "
            f"`caption_column`: {', '.join(inner)}."
        )
    return column


def _find_column(name: str, dataset: Dataset, given: str | None, usual: Sequence[str], *, kind: str) -> str | None:
    """Return the column that the caller named, or the only one with a usual name."""
    if given is not None and has_column(dataset, given):
        return given
    return choose_column(name, nested_names(dataset), given, usual, kind=kind)


def _shown(cell: Any) -> str:
    if isinstance(cell, dict) and set(cell) == {"path", "bytes"}:
        cell = cell["path"] or cell["bytes"]
    if isinstance(cell, bytes):
        return f"{len(cell)} bytes"
    text = str(cell) if isinstance(cell, str) else repr(cell)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
