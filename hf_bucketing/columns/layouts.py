"""What a layout of media and captions is, and what all of them share: requests, rows, and loading with datasets.

A layout returns a `Dataset`, or an `IterableDataset` where the request is for a stream; what a stream cannot be, such
as a part of rows whose number is not known, is refused here, with the reason.
"""

from __future__ import annotations

import csv
import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa
from datasets import Dataset, IterableDataset, ReadInstruction, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetsError

from ..errors import MediaError
from ..hub import from_hub
from ..media.remote import HOW_TO_REACH, is_url, reason_of
from .apply import undecoded
from .settings import MediaKind, RowsConfig

_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """Files that the captions of one source were read from; none of URLs and of data sets on the hub.

    Args:
        files (`tuple` of `str`): Tables, lists and tars, each with the captions of many rows.
        extension (`str`, *optional*): Ending of files beside the media, each with the caption of one; None if there
            are none.
        newest (`int`): Latest time of modification of all of them when they were read, in nanoseconds. Times of one
            file system are compared, and no clock of a machine.
    """

    files: tuple[str, ...] = ()
    extension: str | None = None
    newest: int = 0

    @classmethod
    def of_many(cls, files: Sequence[str]) -> TextFiles:
        """Return the value for files with captions of many rows."""
        return cls(files=tuple(files), newest=max(_changed(files), default=0))

    @classmethod
    def sidecars(cls, files: Sequence[str], *, extension: str) -> TextFiles:
        """Return the value for files of this ending beside the media."""
        return cls(extension=extension, newest=max(_changed(files), default=0))

    def edited(self, files: Sequence[str]) -> list[str]:
        """Return which of some files were changed since the captions were read; one that is gone was not."""
        return [file for file, time in zip(files, _changed(files), strict=True) if time > self.newest]


def _changed(files: Sequence[str]) -> list[int]:
    """Return the time of modification of each file, 0 for one that is not there."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(_time_of, files))


def _time_of(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


STILL_IMAGES = frozenset(
    {".avif", ".bmp", ".heic", ".heif", ".hif", ".jfif", ".jpe", ".jpeg", ".jpg", ".jxl", ".png", ".tif", ".tiff"}
)
"""Endings of files that usually hold a single image."""

_ANIMATIONS = {".apng", ".gif", ".webp"}
_VIDEOS = {".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts"}
MEDIA_FILES = STILL_IMAGES | _ANIMATIONS | _VIDEOS | {".webm", ".wmv"}
"""Endings of the files that count as samples in folders without a list of samples."""
MEDIA_OF_KIND: Mapping[MediaKind, frozenset[str]] = {
    "all": MEDIA_FILES,
    "images": STILL_IMAGES | _ANIMATIONS,
    "videos": MEDIA_FILES - STILL_IMAGES - _ANIMATIONS,
}
"""Those of each kind of media."""

MEDIA_COLUMNS = ("file_name", "video", "video_path", "path", "file_path", "image", "url", "image_path", "media_path")
"""Names under which a data set usually holds its media, if it holds no `Image` or `Video` column."""

CAPTION_COLUMNS = ("caption", "text", "prompt", "description", "txt", "cap")
"""Names under which a data set usually holds its captions."""

TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
"""Builder of datasets, and its options, for each ending of a table."""

_CSV_ROWS_PER_CHUNK = 1_000_000
"""Column types are inferred chunk by chunk, and chunks whose types differ (fps 30, then 29.97) are an error."""

_HEADER_BYTES = 65536

_MISSING_CELLS = ["", "NA", "N/A", "NaN", "nan", "n/a", "NULL", "null", "None", "<NA>"]
"""Cells of a csv that are no values in columns other than texts, as pandas has them by default."""

CAPTION_EXTENSION = ".txt"
"""Ending of the files of captions beside media."""

_SHARDS = 48
"""Parts of a list of files that is read as a stream; it divides among 2, 3, 4, 6, 8, 12, 16 or 24 readers."""

Rows: TypeAlias = Dataset | IterableDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """Data set that a caller asked for; the arguments of `load_source`, and columns that are dropped."""

    path_or_name: str
    split: str = "train"
    config_name: str | None = None
    media_column: str | None = None
    caption_column: str | None = None
    caption_extension: str | None = None
    missing_caption: str | None = None
    companions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    media_kind: MediaKind = "all"
    ignored: Sequence[str] = ()
    streaming: bool = False

    @classmethod
    def of(cls, config: RowsConfig, *, streaming: bool = False) -> SourceRequest:
        """Return the request for the rows that a configuration describes; of several caption columns, the first."""
        return cls(
            path_or_name=config.dataset,
            split=config.split,
            config_name=config.dataset_config_name,
            media_column=config.media_column,
            caption_column=None if config.caption_column is None else config.caption_column.split(",")[0],
            caption_extension=config.sidecars.caption_extension,
            missing_caption=config.sidecars.missing_caption,
            companions=config.sidecars.companions,
            media_kind=config.sidecars.media_kind,
            ignored=config.ignore_columns or (),
            streaming=streaming,
        )

    @property
    def path(self) -> Path:
        """Name as a path, whether it exists or not."""
        return Path(self.path_or_name)

    @property
    def ending(self) -> str:
        """Ending of the name, in lower case, such as `.csv`; of the path alone if it is a URL."""
        name = self.path_or_name
        return PurePosixPath(urlsplit(name).path if is_url(name) else name).suffix.lower()

    @property
    def files(self) -> list[str]:
        """The file of the name, or the files that match it as a pattern, sorted; none for folders, URLs and others."""
        if self.path.is_file():
            return [self.path_or_name]
        return sorted(filter(os.path.isfile, glob.glob(self.path_or_name, recursive=True)))

    @property
    def wants_sidecars(self) -> bool:
        """Whether the caller asked for captions or other files beside the media, by a setting of these alone."""
        by_endings = self.caption_extension is not None or self.media_kind != "all"
        return by_endings or self.missing_caption is not None or bool(self.companions)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """Rows of one layout.

    Args:
        dataset (`Dataset` or `IterableDataset`): The rows, or the stream of them.
        layout (`str`): Description of what was read.
        choose (`str`): Clause that says how to ask for this layout, if another one could be meant as well.
        root (`str`, *optional*): Folder or URL of relative paths.
        media_column (`str`, *optional*): Media column, if the layout fixes it.
        texts ([`TextFiles`][hf_bucketing.columns.layouts.TextFiles]): Local files with the captions.
    """

    dataset: Rows
    layout: str
    choose: str = ""
    root: str | None = None
    media_column: str | None = None
    texts: TextFiles = field(default_factory=TextFiles)


Layout = Callable[[SourceRequest], "SourceRows | None"]
"""Function that reads the rows of one layout, or returns None for other layouts; raises as `load_source`."""


def loaded_by_datasets(request: SourceRequest) -> SourceRows:
    """Load any other folder or a name on the hub with `datasets.load_dataset`.

    Relative paths in a data set on the hub are those of files in its repository.
    """
    name, path = request.path_or_name, request.path
    if is_url(name):
        raise MediaError(
            f"{name} is the URL of no table and no tar; name a .csv, .tsv, .json, .jsonl, .parquet or .tar file, or a "
            "data set on the hub as owner/name."
        )
    if not path.is_dir() and (path.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise MediaError(f"The folder {path} does not exist; pass a folder or the name of a hub data set.")
    dataset = load(request, name, request.config_name)
    tables = [str(file) for file in path.rglob("*") if file.suffix.lower() in TABLES] if path.is_dir() else []
    return SourceRows(
        dataset=dataset,
        layout=f"{count_rows(dataset)}, loaded by datasets",
        root=default_root(name),
        texts=TextFiles.of_many(tables),
    )


def default_root(name: str) -> str:
    """Return where relative paths start that lie in a folder, in files, or in a data set on the hub."""
    if os.path.isdir(name):
        return name
    files = SourceRequest(path_or_name=name).files
    return os.path.dirname(files[0]) if files else f"hf://datasets/{name}"


def is_local(name: str) -> bool:
    """Return whether a name means a folder or files here, and no URL or data set on the hub."""
    return os.path.isdir(name) or bool(SourceRequest(path_or_name=name).files)


def count_rows(dataset: Rows) -> str:
    """Return how many rows there are, in words, or how many shards a stream has."""
    if isinstance(dataset, Dataset):
        return f"{len(dataset)} rows"
    return f"a stream of {dataset.num_shards} {'shard' if dataset.num_shards == 1 else 'shards'}"


def load(request: SourceRequest, builder: str, *args: Any, **options: Any) -> Rows:
    """Call `datasets.load_dataset` for the split of a request, as rows or as a stream with media as paths or bytes.

    Raises:
        MediaError: If datasets cannot load the files, or the part of a stream's split cannot be counted.
        BucketingError: If datasets cannot load the folder or hub data set, or the hub cannot be reached.
    """
    if not request.streaming:
        return _load(builder, *args, split=request.split, **options)
    split, first, end = _rows_of_split(request.split)
    rows: IterableDataset = _load(builder, *args, split=split, streaming=True, **options)
    rows = undecoded(rows, rows.features or ())
    if not first and end is None:
        return rows
    if rows.num_shards > 1:
        raise MediaError(
            f"The rows of {request.split!r} cannot be counted in the {rows.num_shards} shards of "
            f"{request.path_or_name}, which are read at once; name the files to train from, and others to hold out."
        )
    rows = rows.skip(first) if first else rows
    return rows if end is None else rows.take(max(0, end - first))


def _load(*args: Any, **options: Any) -> Any:
    if "data_files" not in options:
        with from_hub(str(args[0])):
            return load_dataset(*args, **options)
    try:
        return load_dataset(*args, **options)
    except (DatasetsError, OSError, ValueError, ImportError) as error:  # ValueError: an unknown split, or no table
        what = options["data_files"]["train"]
        if "corresponds to no data" in str(error):
            raise MediaError(f"{what} holds no rows; write one per sample, with a file and a caption.") from error
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        raise MediaError(f"datasets cannot load {what}: {error}{cause}") from error
    except Exception as error:  # types depend on the protocol and its package
        what = options["data_files"]["train"]
        if not is_url(what if isinstance(what, str) else what[0]):
            raise
        raise MediaError(f"{what} cannot be reached ({reason_of(error)}); {HOW_TO_REACH}.") from error


def builder_of(path: str, *texts: str | None) -> tuple[str, dict[str, Any]]:
    """Return the builder of datasets for a table, and its options, for rows and for streams alike.

    In a csv, media and captions are texts: a caption `0001` stays so, `NA` is one, and only an empty cell is missing.

    Args:
        path (`str`): Path or URL of the table, with an ending of `TABLES`.
        texts (`str`, *optional*): Columns of texts that the caller named, separated by commas, beside the usual ones.

    Raises:
        MediaError: If the header of a csv cannot be read.
    """
    builder, options = TABLES[SourceRequest(path_or_name=path).ending]
    if builder == "csv":
        named = {name for text in texts if text is not None for name in text.split(",")}
        columns = csv_header(path, sep=options.get("sep", ","))
        known = {*MEDIA_COLUMNS, *CAPTION_COLUMNS, *named} & set(columns)
        missing = {name: [""] if name in known else _MISSING_CELLS for name in columns}
        options = {**options, "chunksize": _CSV_ROWS_PER_CHUNK, "converters": dict.fromkeys(sorted(known), str)}
        options |= {"keep_default_na": False, "na_values": missing}
    return builder, options


def csv_header(path: str, *, sep: str) -> list[str]:
    """Return the names of a csv's columns, by the beginning of the file or URL.

    Raises:
        MediaError: If it cannot be read.
    """
    try:
        with fsspec.open(path, "rb") if is_url(path) else open(path, "rb") as file:
            head = file.read(_HEADER_BYTES)
    except Exception as error:  # of any file system of fsspec
        raise MediaError(f"{path} cannot be read ({error}); correct the path, or make it readable.") from error
    return next(csv.reader(head.decode("utf-8-sig", errors="replace").splitlines()[:1], delimiter=sep), [])


def usual_media(names: Sequence[str], *, typed: Sequence[str] = ()) -> list[str]:
    """Return which columns may be the media: those of media types, else those with usual names.

    The columns of tars are the endings of their files, as `mp4`, `MP4` or `v2.mp4`.
    """
    usual = list(typed) or [name for name in MEDIA_COLUMNS if name in names]
    return usual or [name for name in names if "__key__" in names and "." + last_part(name) in MEDIA_FILES]


def usual_captions(names: Sequence[str]) -> list[str]:
    """Return which columns may be the captions: those with usual names, else those in columns of dicts.

    The columns of tars are the endings of their files, as `txt`, `TXT` or `v2.txt`.
    """
    return [name for name in CAPTION_COLUMNS if name in names] or [
        name for name in names if last_part(name) in CAPTION_COLUMNS
    ]


def last_part(name: str) -> str:
    """Return what follows the last dot of a name, in lower case."""
    return name.rpartition(".")[2].lower()


def data_files(files: Sequence[str]) -> dict[str, str | list[str]]:
    """Return the `data_files` of files or URLs, all of which belong to the split `train`."""
    escaped = [file if is_url(file) else glob.escape(file) for file in files]
    return {"train": escaped[0] if len(escaped) == 1 else escaped}


_RANGE = re.compile(r"([\w.]+)(?:\[(\d*):(\d*)\])?")
"""Split of a stream: a name, and maybe the first row and the one after the last, counted from the beginning."""


def _rows_of_split(split: str) -> tuple[str, int, int | None]:
    """Return the name of a stream's split, its first row, and the row after its last one, if it has an end.

    Raises:
        MediaError: If the split needs the number of rows, which a stream does not know, or is none.
    """
    match = _RANGE.fullmatch(split)
    if match is None:
        raise MediaError(
            f"The split {split!r} is none of a stream: it has the name of a split, or rows counted from its beginning "
            "as train[:100] or train[100:], since how many there are is not known. Prepare it without `streaming`, or "
            "hold out whole files."
        )
    name, first, end = match.groups()
    return name, int(first or 0), int(end) if end else None


def listed_rows(request: SourceRequest, table: pa.Table) -> Rows:
    """Return the rows of a list of files, such as those of a folder, which all belong to the split `train`.

    Raises:
        MediaError: If the request has another split, or no row of the list for a stream.
    """
    dataset = _part(Dataset(table), request.split)
    if not request.streaming:
        return dataset
    if not len(dataset):
        raise MediaError(f"{request.path_or_name} has no rows of {request.split}, so that nothing can be streamed.")
    return dataset.to_iterable_dataset(num_shards=min(len(dataset), _SHARDS))


def _part(dataset: Dataset, split: str) -> Dataset:
    """Return the rows of a split such as `train[:100]`."""
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({"train": len(dataset)})
    except (ValueError, AssertionError) as error:
        raise MediaError(f"A folder of files has the split train, or parts as train[:100]: {error}") from error
    ranges = [range(*slice(part.from_, part.to).indices(len(dataset))) for part in parts]
    if len(ranges) == 1:
        return dataset.select(ranges[0])
    return concatenate_datasets([dataset.select(rows) for rows in ranges])
