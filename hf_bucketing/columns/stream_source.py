"""A source of data that is read while training draws from it: which files, columns and sizes."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import IterableDataset, load_dataset
from datasets.exceptions import DatasetsError

from ..errors import ColumnError, MediaError
from ..hub import from_hub
from ..media.rows import MediaColumns
from ..randomness import Purpose, integer_seed
from .apply import undecoded
from .buckets import BucketColumns
from .captions import CaptionTexts
from .clips import ClipRows
from .conditions import ConditionColumns
from .layouts import TABLES, builder_of, choose_column, hub_root, stream_part, usual_captions, usual_media
from .metadata import ExistingMetadata, MediaMetadata
from .settings import ClipRule, OnCaptionError, Treatment
from .stream_columns import CAPTION, MEDIA, StreamColumns

SAMPLED_ROWS = 64
"""Rows that are read to find columns and to report, before a stream is used."""

_SAMPLED_BYTES = 2**28
"""Bytes after which no more of them are read."""

_BATCH_ROWS = 8
"""Rows whose columns are computed at once, small because their files may be in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource:
    """Name the rows of a stream, and how their columns are computed; plain values, which a prepared folder holds.

    Args:
        dataset (`str`): Data set on the hub, or a folder, file or pattern of tar, parquet, csv, tsv, json or jsonl
            files.
        config_name (`str`, *optional*): Configuration of a hub data set.
        split (`str`): Split, such as `"train"`.
        media_column (`str`): Media column, dotted if it is nested.
        caption_columns (sequence of `str`): Columns of texts or lists of texts, dotted if they are nested.
        caption_template (`str`, *optional*): Text that each caption becomes.
        sizes (mapping of `str` to `str`): Columns that hold the size of every row, by what they hold; none where
            headers are read.
        target_fps (`float`): Frame rate to train at.
        clips (`str`, *optional*): Clips that files are cut into, as [`ClipRule`] reads them.
        clip_frames (`int`, *optional*): Frames of a clip.
        on_error (`"raise"`, `"reject"` or `"empty"`): Treatment of unreadable files, and, with `on_caption_error`,
            of captions that are not text; see [`Treatment`].
        on_caption_error (`"raise"`, `"reject"` or `"empty"`, *optional*): Treatment of such captions.
        conditions (mapping of `str` to `str`): Column of each condition.
    """

    dataset: str
    config_name: str | None = None
    split: str = "train"
    media_column: str
    caption_columns: Sequence[str]
    caption_template: str | None = None
    sizes: Mapping[str, str] = field(default_factory=dict)
    target_fps: float = 16.0
    clips: str | None = None
    clip_frames: int | None = None
    on_error: OnCaptionError = "raise"
    on_caption_error: OnCaptionError | None = None
    conditions: Mapping[str, str] = field(default_factory=dict)

    @property
    def metadata(self) -> MediaMetadata:
        """How sizes are read from headers."""
        return MediaMetadata(
            MEDIA, target_fps=self.target_fps, root=root_of(self.dataset), on_error=self.treatment.files
        )

    @property
    def treatment(self) -> Treatment:
        """Treatment of rows at fault."""
        return Treatment.of(self.on_error, self.on_caption_error)

    def columns(self, buckets: BucketColumns) -> StreamColumns:
        """Return the function that computes the columns of its rows."""
        existing = clips = None
        if self.sizes:
            existing = ExistingMetadata(**self.sizes, target_fps=self.target_fps if "fps" in self.sizes else None)
        if self.clips is not None:
            rule = ClipRule.parse(self.clips, frames=self.clip_frames)
            clips = ClipRows(rule, on_error=self.treatment.files, caption_column=CAPTION, media_column=MEDIA)
        files = MediaColumns(
            column=MEDIA, root=self.metadata.root, conditions={name: name for name in self.conditions}
        )
        return StreamColumns(
            media_column=self.media_column,
            captions=CaptionTexts(
                tuple(self.caption_columns),
                on_error=self.treatment.captions,
                template=self.caption_template,
                media_column=MEDIA,
            ),
            metadata=self.metadata,
            existing=existing,
            clips=clips,
            conditions=self.conditions,
            check=ConditionColumns(files, on_error=self.treatment.files),
            buckets=buckets,
        )

    def open(self, buckets: BucketColumns, *, shuffle_buffer: int = 0, seed: int = 0) -> IterableDataset:
        """Return the stream of its rows, with the columns of [`StreamColumns`]; no row is read yet.

        Args:
            buckets ([`BucketColumns`]): Table and rule of the buckets.
            shuffle_buffer (`int`): Rows, or clips, among which each next one is drawn; 0 keeps the order of the files.
            seed (`int`): Seed of that draw.

        Raises:
            MediaError: If there are no such files, or datasets cannot read them.
            HubError: If the hub cannot be reached.
        """
        texts = (self.media_column, *self.caption_columns)
        rows = open_rows(self.dataset, split=self.split, config_name=self.config_name, texts=texts)
        outer = {column.partition(".")[0] for column in (self.media_column, *self.conditions.values())}
        named = {self.media_column, *self.conditions.values()}
        rows = undecoded(rows, outer | named)
        present = list(rows.column_names or next(iter(rows)))
        if self.clips is None:  # before the map, as shuffling reads many shards at once, each by whole batches
            rows = _shuffled(rows, shuffle_buffer, seed)
        rows = rows.map(self.columns(buckets), batched=True, batch_size=_BATCH_ROWS, remove_columns=present)
        return rows if self.clips is None else _shuffled(rows, shuffle_buffer, seed)


def _shuffled(rows: IterableDataset, buffer_size: int, seed: int) -> IterableDataset:
    return rows.shuffle(seed=integer_seed(Purpose.STREAM, seed), buffer_size=buffer_size) if buffer_size else rows


def open_rows(
    dataset: str, *, split: str = "train", config_name: str | None = None, texts: Sequence[str | None] = ()
) -> IterableDataset:
    """Return the rows of a hub data set, or of a folder, file or pattern of files, as `datasets` streams them.

    A folder with a table named `metadata` is that table; `datasets` chooses how it reads any other one. All files
    belong to the split `train`. Rows of a part such as `train[:100]` can be counted where one file holds them all.

    Args:
        dataset (`str`): What to read.
        split (`str`): Split, or a part of it that is counted from its beginning.
        config_name (`str`, *optional*): Configuration of a hub data set.
        texts (sequence of `str`, *optional*): Columns of texts that the caller named.

    Raises:
        MediaError: If datasets cannot read the files, they are empty or of several kinds, or the part of the split
            cannot be counted.
        HubError: If there are no such files, and the hub has no such data set or cannot be reached.
        BucketingError: If datasets cannot read the folder or hub data set.
    """
    name, first, end = stream_part(split)
    rows = _open_split(dataset, name, config_name=config_name, texts=texts)
    if not first and end is None:
        return rows
    if rows.num_shards > 1:
        raise MediaError(
            f"The rows of {split!r} cannot be counted in the {rows.num_shards} shards of {dataset}, which are read at "
            "once; name the files to train from, and other ones to hold out."
        )
    rows = rows.skip(first) if first else rows
    return rows if end is None else rows.take(max(0, end - first))


def _open_split(dataset: str, split: str, *, config_name: str | None, texts: Sequence[str | None]) -> IterableDataset:
    path = Path(dataset)
    tables = [found for ending in TABLES if (found := path / f"metadata{ending}").is_file()]
    if len(tables) > 1:
        raise MediaError(
            f"{' and '.join(map(str, tables))} could both be meant; name one of them instead of the folder."
        )
    files = [str(table) for table in tables] or _files_of(dataset)
    if not files or (path.is_dir() and not tables):
        with from_hub(dataset):
            return load_dataset(dataset, config_name, split=split, streaming=True)
    builder, options = _builder_of(dataset, files, texts)
    if not any(map(os.path.getsize, files)):
        raise MediaError(f"{dataset} is empty; write one row per sample, with a file and a caption.")
    if split != "train":
        raise MediaError(f"The files of {dataset} have the split train, or parts as train[:100], and not {split!r}.")
    data_files = {split: [glob.escape(os.path.abspath(file)) for file in files]}
    try:
        return load_dataset(builder, data_files=data_files, split=split, streaming=True, **options)
    except (DatasetsError, OSError, ValueError) as error:
        raise MediaError(f"datasets cannot stream {dataset}: {error}") from error


def root_of(dataset: str) -> str | None:
    """Return the folder or URL that relative paths in the rows start from: that of the files, or of the hub."""
    return local_root(dataset) or hub_root(dataset)


def local_root(dataset: str) -> str | None:
    """Return the folder of the files that a name means; None for a hub data set."""
    if os.path.isdir(dataset):
        return os.path.abspath(dataset)
    files = _files_of(dataset)
    return os.path.dirname(os.path.abspath(files[0])) if files else None


def _files_of(dataset: str) -> list[str]:
    """Return the file of a name, or the files of a pattern."""
    return [dataset] if os.path.isfile(dataset) else sorted(glob.glob(dataset, recursive=True))


def first_rows(dataset: IterableDataset, *, name: str) -> list[dict[str, Any]]:
    """Return the first rows of a stream as they are stored, with media as paths or bytes.

    Raises:
        MediaError: If there are none, or datasets cannot read them.
    """
    typed = [column for column, kind in (dataset.features or {}).items() if type(kind).__name__ in ("Image", "Video")]
    rows: list[dict[str, Any]] = []
    num_bytes = 0
    try:
        for row in islice(undecoded(dataset, typed), SAMPLED_ROWS):
            rows.append(row)
            num_bytes += bytes_in(row)
            if num_bytes > _SAMPLED_BYTES:
                break
    except (DatasetsError, OSError, ValueError) as error:
        raise MediaError(f"datasets cannot read the first rows of {name}: {error}") from error
    if not rows:
        raise MediaError(f"{name} has no rows; write one per sample, with a file and a caption.")
    return rows


def find_media_column(dataset: IterableDataset, rows: Sequence[Mapping[str, Any]], given: str | None) -> str:
    """Return the media column that the caller named, or the only one that is typed or named as one usually is.

    Raises:
        ColumnError: If there is none, or several could be meant.
    """
    typed = [column for column, kind in (dataset.features or {}).items() if type(kind).__name__ in ("Image", "Video")]
    present = columns_of(rows)
    return _chosen(present, given, usual_media(present, typed=typed), kind="media")


def find_caption_columns(rows: Sequence[Mapping[str, Any]], given: str | None) -> list[str]:
    """Return the text columns that the caller named, or the only one named as one usually is: `txt`, ….

    Raises:
        ColumnError: If there is none, or several could be meant.
    """
    present = columns_of(rows)
    names = [None] if given is None else given.split(",")
    return [_chosen(present, name, usual_captions(present), kind="caption") for name in names]


def check_present(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Raise ColumnError if the first rows lack a column, by what it holds: `{"control": "depth"}`."""
    for name, column in columns.items():
        _chosen(columns_of(rows), column, (), kind=name)


def _chosen(present: Sequence[str], given: str | None, usual: Sequence[str], *, kind: str) -> str:
    found = choose_column("The stream", present, given, usual, kind=kind)
    if found is None:
        raise ColumnError(
            f"No {kind} column was found among {', '.join(present)}; name one as `{kind}_column`. A stream reads tars "
            "of media and captions, parquet files, and tables of paths; prepare a folder of media with captions "
            "beside them without `streaming`."
        )
    return found


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of some rows, and those nested in dictionaries, such as `json.caption`."""
    names: dict[str, None] = {}
    for row in rows:
        for name, value in row.items():
            names[name] = None
            if isinstance(value, Mapping) and set(value) != {"path", "bytes"}:
                names |= dict.fromkeys(f"{name}.{inner}" for inner in columns_of([value]))
    return list(names)


def _builder_of(dataset: str, files: Sequence[str], texts: Sequence[str | None]) -> tuple[str, dict[str, Any]]:
    endings = {os.path.splitext(file)[1].lower() for file in files}
    if len(endings) > 1 or not endings <= {".tar", *TABLES}:
        raise MediaError(
            f"{dataset} names {', '.join(sorted(endings))} files; a stream reads files of one kind: "
            f"{', '.join(['.tar', *TABLES])}."
        )
    (ending,) = endings
    return ("webdataset", {}) if ending == ".tar" else builder_of(files[0], *texts)


def bytes_in(row: Mapping[str, Any]) -> int:
    """Return how many bytes the files and texts of a row take in memory."""
    cells = (value.get("bytes") if isinstance(value, Mapping) else value for value in row.values())
    return sum(len(cell) for cell in cells if isinstance(cell, bytes | str))
