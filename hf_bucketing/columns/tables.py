"""Layouts with a list of samples, such as tables, folders that hold one and tars; and the list of all layouts."""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import MediaError
from ..media.remote import is_url
from .beside import captions_beside, files_below, files_in, read_bytes, text_column
from .layouts import (
    CAPTION_COLUMNS,
    MEDIA_COLUMNS,
    MEDIA_FILES,
    TABLES,
    Layout,
    SourceRequest,
    SourceRows,
    TextFiles,
    builder_of,
    count_rows,
    csv_header,
    data_files,
    listed_rows,
    load,
)

_FASTVIDEO = "videos2caption.json"
_MAPPING = "captions.json"
_MEDIA_LINES = ("videos.txt", "video.txt", "images.txt", "image.txt")
_CAPTION_LINES = ("prompts.txt", "prompt.txt", "captions.txt", "caption.txt")


def named_file(request: SourceRequest) -> SourceRows | None:
    """Read a table, or a list of media, whose path, URL or pattern was given."""
    name, path = request.path_or_name, request.path
    if is_url(name):
        return _read_table([name], request) if request.ending in TABLES else None
    if not path.is_file():
        return _pattern(request)
    if request.ending == ".tar":
        return None
    if path.name in _MEDIA_LINES:
        return _read_lines(path, request)
    if path.name == _MAPPING and (rows := _read_mapping(path, request)) is not None:
        return rows
    if request.ending == ".toml":
        raise MediaError(f"{path} lists sources of data, and here one source is read; read the list with `load_toml`.")
    if request.ending not in TABLES:
        raise MediaError(
            f"{path} is not a table of samples: name a {', '.join(TABLES)} file, a .tar, a folder, or a data set on "
            "the hub."
        )
    return _read_table([name], request)


def _pattern(request: SourceRequest) -> SourceRows | None:
    """Read the tables that match a pattern such as `parts/*.parquet`; None for tars, folders and names on the hub."""
    name, files = request.path_or_name, request.files
    if not files:
        if request.path.is_dir():
            return None
        if glob.has_magic(name) or request.ending == ".tar":
            raise MediaError(f"No file is named {name}; correct the path or the pattern.")
        if request.ending in {*TABLES, ".toml"}:
            raise MediaError(f"The file {request.path} does not exist; correct the path.")
        return None
    endings = _endings(files)
    if endings == {".tar"}:
        return None
    if len(endings) > 1 or not endings <= {*TABLES}:
        raise MediaError(
            f"{name} names {', '.join(sorted(endings))} files; those of a pattern must be of one kind: "
            f"{', '.join(['.tar', *TABLES])}."
        )
    return _read_table(files, request)


def _endings(files: Sequence[str]) -> set[str]:
    return {os.path.splitext(file)[1].lower() for file in files}


def tars(request: SourceRequest) -> SourceRows | None:
    """Read tars of webdataset: one file or URL, a pattern such as `shards/*.tar`, or a folder whose files are tars."""
    name, path = request.path_or_name, request.path
    if path.is_dir():
        names = files_in(path)
        files = [] if any(map(_is_media, names)) else [str(path / name) for name in names if name.endswith(".tar")]
    elif is_url(name):
        files = [name] if request.ending == ".tar" else []
    else:
        files = request.files if _endings(request.files) == {".tar"} else []
    if not files:
        return None
    dataset = load(request, "webdataset", data_files=data_files(files))
    count = f"{len(files)} tars" if len(files) > 1 else os.path.basename(files[0])
    return SourceRows(
        dataset=dataset,
        layout=f"{count_rows(dataset)} of {count}",
        choose=f"name {files[0]}",
        texts=TextFiles.of_many([file for file in files if not is_url(file)]),
    )


def listed_folder(request: SourceRequest) -> SourceRows | None:
    """Read a folder's table: `metadata.csv` or its like, FastVideo's json, or the only table that names its files."""
    folder = request.path
    if not folder.is_dir() or request.beside:
        return None
    tables = [name for name in files_in(folder) if Path(name).suffix.lower() in TABLES]
    metadata = [name for name in tables if Path(name).stem in ("metadata", Path(_FASTVIDEO).stem)]
    chosen = metadata or [name for name in tables if _lists_media(folder / name, request)]
    if not chosen or (not metadata and not _holds_media(folder)):
        return None
    return _read_table([str(_only(folder, chosen))], request, media_column="file_name" if metadata else None)


def lines_folder(request: SourceRequest) -> SourceRows | None:
    """Read a folder with a file of paths and a file of captions, one per line, such as `videos.txt`, `prompts.txt`."""
    folder = request.path
    if not folder.is_dir() or request.beside:
        return None
    media = [name for name in _MEDIA_LINES if (folder / name).is_file()]
    captions = [name for name in _CAPTION_LINES if (folder / name).is_file()]
    if not media or not captions:
        return None
    return _read_lines(_only(folder, media), request)


def _only(folder: Path, names: Sequence[str]) -> Path:
    """Return the only one of the files of a folder that could be meant.

    Raises:
        MediaError: If there are several.
    """
    if len(names) > 1:
        both = " and ".join(str(folder / name) for name in names)
        raise MediaError(f"{both} could both be meant; name one of them instead of the folder.")
    return folder / names[0]


def mapped_folder(request: SourceRequest) -> SourceRows | None:
    """Read a folder whose `captions.json` maps the name of each file to its captions, as in diffusion-pipe."""
    path = request.path / _MAPPING
    return _read_mapping(path, request) if path.is_file() and not request.beside else None


def _read_mapping(path: Path, request: SourceRequest) -> SourceRows | None:
    """Return a row for each key of a json object of captions; None for other jsons."""
    try:
        captions = json.loads(read_bytes(path))
    except ValueError:
        return None
    if not isinstance(captions, dict) or "caption" in captions:
        return None
    wrong = next((key for key, value in captions.items() if not _is_captions(value)), None)
    if wrong is not None or not captions:
        got = f"{wrong} has {captions[wrong]!r}" if wrong is not None else "it is empty"
        raise MediaError(f"{path} must map names of files to a caption or a list of captions, but {got}.")
    several = any(isinstance(value, list) for value in captions.values())
    texts = [[value] if several and isinstance(value, str) else value for value in captions.values()]
    return SourceRows(
        dataset=listed_rows(request, pa.table({"file_name": list(captions), "caption": texts})),
        layout=f"{len(captions)} files of {path.name}",
        choose=f"name {path}",
        root=str(path.parent),
        texts=TextFiles.of_many([str(path)]),
    )


def _is_captions(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _read_lines(path: Path, request: SourceRequest) -> SourceRows:
    """Read the paths of a file and the captions of the file beside it, line by line."""
    texts = [one for name in _CAPTION_LINES if (one := path.parent / name).is_file()]
    if len(texts) != 1:
        which = f"{' and '.join(map(str, texts))} could both be meant; keep" if texts else f"{path} needs"
        raise MediaError(f"{which} one file of captions beside it: {', '.join(_CAPTION_LINES)}.")
    files, captions = _lines(path), _lines(texts[0])
    if len(files) != len(captions):
        raise MediaError(
            f"{path} has {len(files)} lines and {texts[0]} {len(captions)}; each line of one must belong to the same "
            "line of the other."
        )
    try:
        paths = pa.array([line.decode() for line in files], pa.string())
    except UnicodeDecodeError as error:
        raise MediaError(f"{path} is not UTF-8 text ({error}); write it again.") from error
    return SourceRows(
        dataset=listed_rows(request, pa.table({"file_name": paths, "caption": text_column(captions)})),
        layout=f"{len(files)} lines of {path.name} with the captions of {texts[0].name}",
        choose=f"name {path}",
        root=_root(path.parent, files[0].decode() if files else ""),
        texts=TextFiles.of_many([str(texts[0])]),
    )


def _lines(path: Path) -> list[bytes]:
    """Return the lines of a file without white space at their ends, and without empty lines at its end."""
    lines = [line.strip() for line in read_bytes(path).split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise MediaError(f"{path} is empty; write one line per sample.")
    return lines


def _root(folder: Path, first: str) -> str:
    """Return the folder of a list, or its folder `videos` or `images` if the first file is there alone (FastVideo)."""
    if not os.path.isabs(first) and not (folder / first).exists():
        for inner in (folder / "videos", folder / "images"):
            if (inner / first).is_file():
                return str(inner)
    return str(folder)


def _read_table(files: Sequence[str], request: SourceRequest, *, media_column: str | None = None) -> SourceRows:
    """Read one table, or several of the same kind and columns."""
    path = files[0]
    url = is_url(path)
    if not url and not any(read_bytes(Path(file), 4096).strip() for file in files):
        raise MediaError(f"{path} is empty; write one row per sample, with a file_name and a caption.")
    builder, options = builder_of(path, request.media_column, request.caption_column)
    dataset = load(request, builder, data_files=data_files(files), **options)
    root = path.partition("?")[0].rpartition("/")[0] if url else str(Path(path).parent)
    name = path.rpartition("/")[2]
    if name == _FASTVIDEO:
        root = _root(Path(path).parent, next((str(row["path"]) for row in dataset if "path" in row), ""))
    return SourceRows(
        dataset=dataset,
        layout=f"{count_rows(dataset)} of {name if len(files) == 1 else f'{len(files)} tables'}",
        choose=f"name {path}",
        root=root,
        media_column=media_column,
        texts=TextFiles.of_many([] if url else files),
    )


def _lists_media(table: Path, request: SourceRequest) -> bool:
    """Return whether a table has a media and a caption column, by the beginning of the file alone."""
    columns = column_names(table)
    media = {request.media_column} if request.media_column else set(MEDIA_COLUMNS)
    captions = {request.caption_column} if request.caption_column else set(CAPTION_COLUMNS)
    return bool(columns & media and columns & captions)


def column_names(table: Path) -> set[str]:
    """Return the names of a table's columns by the beginning of the file; none where that is unreadable.

    Of a json these are the keys of all dicts at its beginning.
    """
    if table.suffix.lower() == ".parquet":
        try:
            return set(pq.read_schema(table).names)
        except pa.ArrowInvalid:
            return set()
    builder, options = TABLES[table.suffix.lower()]
    if builder == "json":
        return set(re.findall(r'"(\w+)"\s*:', read_bytes(table, 65536).decode(errors="replace")))
    return set(csv_header(str(table), sep=options.get("sep", ",")))


def _holds_media(folder: Path) -> bool:
    return any(_is_media(path) for path in files_below(str(folder), Counter()))


def _is_media(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in MEDIA_FILES


LAYOUTS: tuple[Layout, ...] = (named_file, tars, listed_folder, mapped_folder, lines_folder, captions_beside)
"""Layouts that are recognised; everything else is left to `datasets.load_dataset`."""
