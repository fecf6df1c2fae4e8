"""What a layout of data is, and those that datasets reads: tables of samples, folders with one, the hub."""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError

from ..errors import MediaError
from ..hub import from_hub

_TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
"""The builder of datasets, and its options, for each ending of a table."""

_CSV_ROWS_PER_CHUNK = 1_000_000
"""Column types are inferred chunk by chunk, and chunks whose types differ (fps 30, then 29.97) are an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """What a caller asked for."""

    path_or_name: str
    split: str
    config_name: str | None

    @property
    def path(self) -> Path:
        """The name as a path, whether it exists or not."""
        return Path(self.path_or_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """What a layout holds.

    Args:
        dataset (`Dataset`): A row per sample.
        layout (`str`): What was recognised, in words.
        root (`str`, *optional*): Folder that relative paths start from.
        media_column (`str`, *optional*): The name that the layout fixes for its media column.
    """

    dataset: Dataset
    layout: str
    root: str | None = None
    media_column: str | None = None


Layout = Callable[[SourceRequest], "SourceRows | None"]
"""Recognises data that lies in one way, and reads its rows; None if they lie in another way."""


def table_file(request: SourceRequest) -> SourceRows | None:
    """Read a table that is named directly.

    Raises:
        MediaError: If the file does not exist, is empty, or is of another kind.
    """
    path = request.path
    if not path.is_file():
        if path.suffix.lower() in _TABLES and not path.is_dir():
            raise MediaError(f"The file {path} does not exist; correct the path.")
        return None
    if path.suffix.lower() not in _TABLES:
        raise MediaError(
            f"{path} is no table of samples: name a {', '.join(_TABLES)} file, a folder, or a data set on the hub."
        )
    return _read_table(path, request)


def metadata_folder(request: SourceRequest) -> SourceRows | None:
    """Read the table named `metadata` of a folder, as `imagefolder` and `videofolder` have it, for any mix of media.

    Raises:
        MediaError: If there are several, or it is empty.
    """
    tables = [path for ending in _TABLES if (path := request.path / f"metadata{ending}").is_file()]
    if len(tables) > 1:
        raise MediaError(
            f"{' and '.join(map(str, tables))} could both be meant; name one of them instead of the folder."
        )
    return _read_table(tables[0], request, media_column="file_name") if tables else None


def loaded_by_datasets(request: SourceRequest) -> SourceRows:
    """Load any other folder, or a name on the hub, as `datasets.load_dataset` does.

    Raises:
        MediaError: If the folder does not exist, or datasets cannot load it.
    """
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
        what = options["data_files"]["train"] if "data_files" in options else args[0]
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        raise MediaError(f"datasets cannot load {what}: {error}{cause}") from error
