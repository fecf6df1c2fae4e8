"""What a layout of media and captions is, and what all of them share: requests, rows, and loading with datasets."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from datasets import Dataset, ReadInstruction, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetsError

from ..errors import MediaError
from ..hub import from_hub
from ..media.remote import is_url

STILL_IMAGES = frozenset(
    {".avif", ".bmp", ".heic", ".heif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff"}
)
"""Endings of files that usually hold a single image."""

_ANIMATIONS = {".apng", ".gif", ".webp"}
_VIDEOS = {".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts"}
MEDIA_FILES = STILL_IMAGES | _ANIMATIONS | _VIDEOS | {".webm", ".wmv"}
"""Endings of the files that count as samples in folders without a list of samples."""

MEDIA_COLUMNS = ("file_name", "video", "video_path", "path", "file_path", "image", "url", "image_path", "media_path")
"""Names under which a data set usually holds its media, if it holds no `Image` or `Video` column."""

CAPTION_COLUMNS = ("caption", "text", "prompt", "description", "txt", "cap")
"""Names under which a data set usually holds its captions."""

CAPTION_EXTENSION = ".txt"
"""Ending of the files of captions beside media."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """Data set that a caller asked for; the arguments of `load_source`."""

    path_or_name: str
    split: str = "train"
    config_name: str | None = None
    media_column: str | None = None
    caption_column: str | None = None
    caption_extension: str | None = None
    missing_caption: str | None = None
    companions: Mapping[str, str] = field(default_factory=dict)

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
    def beside(self) -> bool:
        """Whether the caller asked for captions or other files beside the media, by a setting of these alone."""
        return self.caption_extension is not None or self.missing_caption is not None or bool(self.companions)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRows:
    """Rows of one layout.

    Args:
        dataset (`Dataset`): The rows.
        layout (`str`): Description of what was read.
        choose (`str`): Clause that says how to ask for this layout, if another one could be meant as well.
        root (`str`, *optional*): Folder or URL of relative paths.
        media_column (`str`, *optional*): Media column, if the layout fixes it.
    """

    dataset: Dataset
    layout: str
    choose: str = ""
    root: str | None = None
    media_column: str | None = None


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
    dataset = load(name, request.config_name, split=request.split)
    root = str(path) if path.is_dir() else f"hf://datasets/{name}" if name.count("/") == 1 else None
    return SourceRows(dataset=dataset, layout=f"{len(dataset)} rows, loaded by datasets", root=root)


def load(*args: Any, **options: Any) -> Dataset:
    """Call `datasets.load_dataset`; what it cannot load is a `MediaError`, or an error about the hub."""
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


def data_files(path: str | Path) -> dict[str, str]:
    """Return the `data_files` of one file or URL, all of which belong to the split `train`."""
    return {"train": str(path) if is_url(str(path)) else glob.escape(str(path))}


def part(dataset: Dataset, split: str) -> Dataset:
    """Return the rows of a split such as `train[:100]`; all files of a folder belong to the split `train`."""
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({"train": len(dataset)})
    except (ValueError, AssertionError) as error:
        raise MediaError(f"A folder of files has the split train, or parts as train[:100]: {error}") from error
    ranges = [range(*slice(part.from_, part.to).indices(len(dataset))) for part in parts]
    if len(ranges) == 1:
        return dataset.select(ranges[0])
    return concatenate_datasets([dataset.select(rows) for rows in ranges])
