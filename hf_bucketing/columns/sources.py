"""Load a data set of media files, from the hub or from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError

from ..errors import ColumnError, MediaError


class MediaDataset(NamedTuple):
    """Rows with a media column; `root` is where its relative paths start from, if it has any."""

    dataset: Dataset
    column: str
    root: str | None


def load_media_dataset(
    name_or_dir: str,
    *,
    split: str = "train",
    config_name: str | None = None,
    column: str | None = None,
    caption_column: str | None = None,
) -> MediaDataset:
    """Load a folder with `metadata.jsonl`, or anything that `datasets.load_dataset` loads.

    Args:
        name_or_dir (`str`): A folder whose `metadata.jsonl` has a `file_name` per row (images and videos together),
            another folder of data files, or the name of a data set on the hub.
        split (`str`): Such as `"train"` or `"train[:100]"`.
        config_name (`str`, *optional*): Configuration of a hub data set.
        column (`str`, *optional*): Media column; by default `file_name` in a folder with `metadata.jsonl`, else
            `video` or `image`.
        caption_column (`str`, *optional*): Text column that must be there.

    Raises:
        MediaError: If the folder does not exist or holds no rows, or datasets cannot load it.
        ColumnError: If there is no such column.
    """
    folder = Path(name_or_dir)
    metadata = folder / "metadata.jsonl"
    if metadata.is_file():
        if not metadata.read_bytes().strip():
            raise MediaError(f"{metadata} is empty; write one JSON object with file_name and caption per line.")
        dataset = _load("json", data_files={"train": str(metadata)}, split=split)
        names, root = ["file_name"], str(folder)
    else:
        if not folder.is_dir() and (folder.is_absolute() or name_or_dir.startswith(".") or name_or_dir.count("/") > 1):
            raise MediaError(f"The folder {folder} does not exist; pass a folder or the name of a hub data set.")
        dataset = _load(name_or_dir, config_name, split=split)
        names, root = ["video", "image"], None
    names = [column] if column else names
    found = next((name for name in names if name in dataset.column_names), None)
    if found is None:
        raise ColumnError(f"{name_or_dir} has no column {' or '.join(names)}, only {dataset.column_names}; name one.")
    if caption_column is not None and caption_column not in dataset.column_names:
        raise ColumnError(f"{name_or_dir} has no caption column {caption_column!r}, only {dataset.column_names}.")
    return MediaDataset(dataset, found, root)


def _load(*args: Any, **options: Any) -> Dataset:
    try:
        return load_dataset(*args, **options)
    except (DatasetsError, FileNotFoundError, ConnectionError) as error:
        raise MediaError(f"datasets cannot load {options.get('data_files', args[0])}: {error}") from error
