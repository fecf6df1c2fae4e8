"""Layouts of media and captions that can be loaded: tables, folders with a table, captions beside files, the hub."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, ReadInstruction, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetsError

from ..errors import MediaError
from ..hub import from_hub

STILL_IMAGES = frozenset(
    {".avif", ".bmp", ".heic", ".heif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff"}
)
"""Endings of files that usually hold a single image."""

_ANIMATIONS = {".apng", ".gif", ".webp"}
_VIDEOS = {".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts"}
MEDIA_FILES = STILL_IMAGES | _ANIMATIONS | _VIDEOS | {".webm", ".wmv"}
"""Endings of the files that count as samples in folders without a list of samples."""

_TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
"""Builder of datasets, and its options, for each ending of a table."""

_CSV_ROWS_PER_CHUNK = 1_000_000
"""Column types are inferred chunk by chunk, and chunks whose types differ (fps 30, then 29.97) are an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """Data set that a caller asked for; the arguments of `load_source`."""

    path_or_name: str
    split: str
    config_name: str | None

    @property
    def path(self) -> Path:
        """Name as a path, whether it exists or not."""
        return Path(self.path_or_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """Rows of one layout, its description, the folder of relative paths, and the media column if it is fixed."""

    dataset: Dataset
    layout: str
    root: str | None = None
    media_column: str | None = None


Layout = Callable[[SourceRequest], "SourceRows | None"]
"""Function that reads the rows of one layout, or returns None for other layouts; raises as `load_source`."""


def table_file(request: SourceRequest) -> SourceRows | None:
    """Read a table whose path was given."""
    path = request.path
    if not path.is_file():
        if path.suffix.lower() in _TABLES and not path.is_dir():
            raise MediaError(f"The file {path} does not exist; correct the path.")
        return None
    if path.suffix.lower() not in _TABLES:
        raise MediaError(
            f"{path} is not a table of samples: name a {', '.join(_TABLES)} file, a folder, or a data set on the hub."
        )
    return _read_table(path, request)


def metadata_folder(request: SourceRequest) -> SourceRows | None:
    """Read a folder's table named `metadata`, as for `imagefolder` and `videofolder` but for any mix of media."""
    tables = [path for ending in _TABLES if (path := request.path / f"metadata{ending}").is_file()]
    if len(tables) > 1:
        raise MediaError(
            f"{' and '.join(map(str, tables))} could both be meant; name one of them instead of the folder."
        )
    return _read_table(tables[0], request, media_column="file_name") if tables else None


def loaded_by_datasets(request: SourceRequest) -> SourceRows:
    """Load any other folder or a name on the hub with `datasets.load_dataset`."""
    name, path = request.path_or_name, request.path
    if not path.is_dir() and (path.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise MediaError(f"The folder {path} does not exist; pass a folder or the name of a hub data set.")
    dataset = _load(name, request.config_name, split=request.split)
    root = str(path) if path.is_dir() else None
    return SourceRows(dataset=dataset, layout=f"{len(dataset)} rows, loaded by datasets", root=root)


def _read_table(path: Path, request: SourceRequest, *, media_column: str | None = None) -> SourceRows:
    try:
        with path.open("rb") as file:
            beginning = file.read(4096)
    except OSError as error:
        raise MediaError(f"{path} cannot be read ({error.strerror}); make it readable.") from error
    if not beginning.strip():
        raise MediaError(f"{path} is empty; write one row per sample, with a file_name and a caption.")
    builder, options = _TABLES[path.suffix.lower()]
    if builder == "csv":
        options = {**options, "chunksize": _CSV_ROWS_PER_CHUNK}
    dataset = _load(builder, data_files={"train": glob.escape(str(path))}, split=request.split, **options)
    return SourceRows(
        dataset=dataset, layout=f"{len(dataset)} rows of {path.name}", root=str(path.parent), media_column=media_column
    )


def _load(*args: Any, **options: Any) -> Dataset:
    if "data_files" not in options:
        with from_hub(str(args[0])):
            return load_dataset(*args, **options)
    try:
        return load_dataset(*args, **options)
    except (DatasetsError, OSError, ValueError) as error:  # ValueError: an unknown split, or a table that is none
        what = options["data_files"]["train"]
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        raise MediaError(f"datasets cannot load {what}: {error}{cause}") from error


def captions_beside(request: SourceRequest) -> SourceRows | None:
    """Read images and videos at any depth, with a `.txt` caption of the same stem beside each.

    One media file with a caption makes a folder of this layout. Missing captions are null. Links are followed.
    """
    if not request.path.is_dir():
        return None
    root = str(request.path)
    media: dict[str, list[str]] = {}
    captions: dict[str, str] = {}
    ignored: Counter[str] = Counter()
    for path in _files(root, ignored):
        stem, ending = os.path.splitext(path)
        if ending.lower() in MEDIA_FILES:
            media.setdefault(stem, []).append(path)
        elif ending.lower() == ".txt":
            captions[stem] = path
        else:
            ignored["of other types"] += 1
    if not media.keys() & captions.keys():
        return None
    _refuse_shared_stems(root, media)
    ignored[".txt without a media file"] = len(captions.keys() - media.keys())
    files = [os.path.relpath(paths[0], root) for paths in media.values()]
    with ThreadPoolExecutor(16) as threads:  # most of the time is spent waiting for storage
        texts = list(threads.map(_read_text, [captions.get(stem) for stem in media]))
    columns = {"file_name": _as_paths(files), "caption": _as_captions(texts)}
    words = ", ".join(f"{count} {what}" for what, count in ignored.items() if count)
    return SourceRows(
        dataset=_part(Dataset(pa.table(columns)), request.split),
        layout=f"{len(files)} media files with .txt captions beside them (ignored files: {words or 'none'})",
        root=root,
    )


def _part(dataset: Dataset, split: str) -> Dataset:
    """Return the rows of a split such as `train[:100]`; all files of a folder belong to the split `train`."""
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({"train": len(dataset)})
    except (ValueError, AssertionError) as error:
        raise MediaError(f"A folder of files has the split train, or parts as train[:100]: {error}") from error
    ranges = [range(*slice(part.from_, part.to).indices(len(dataset))) for part in parts]
    if len(ranges) == 1:
        return dataset.select(ranges[0])
    return concatenate_datasets([dataset.select(rows) for rows in ranges])


def _files(folder: str, ignored: Counter[str], above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
    """Yield the visible files below a folder, sorted; do not follow links back to a folder above."""
    try:
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            return
        with os.scandir(folder) as entries:
            found = sorted((entry.name, entry.is_dir()) for entry in entries)
    except OSError as error:
        raise MediaError(f"The folder {folder} cannot be read ({error.strerror}); make it readable.") from error
    for name, is_folder in found:
        path = os.path.join(folder, name)
        if name.startswith("."):
            ignored["hidden folders" if is_folder else "hidden"] += 1
        elif is_folder:
            yield from _files(path, ignored, above | {identity})
        else:
            yield path


def _refuse_shared_stems(root: str, media: dict[str, list[str]]) -> None:
    shared = [paths for paths in media.values() if len(paths) > 1]
    if shared:
        names = "; ".join(" and ".join(os.path.relpath(path, root) for path in paths) for paths in shared[:3])
        raise MediaError(
            f"{len(shared)} captions in {root} could each belong to several files: {names}; rename or move the files "
            "that are not samples, or list the samples in a metadata.jsonl."
        )


def _read_text(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").strip()
    except OSError as error:
        raise MediaError(f"{path} cannot be read ({error.strerror}); make it readable.") from error


def _as_paths(files: list[str]) -> pa.Array:
    try:
        return pa.array(files, pa.string())
    except UnicodeEncodeError as error:
        raise MediaError(f"The file name {error.object!r} is not UTF-8; rename the file.") from error


def _as_captions(texts: list[bytes | None]) -> pa.Array:
    """Return a column of strings, or of bytes if some are not UTF-8, so that `check_captions` can name those rows."""
    cells = pa.array(texts, pa.binary())
    try:
        return cells.cast(pa.string())
    except pa.ArrowInvalid:
        return cells
