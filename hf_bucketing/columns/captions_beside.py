"""A folder of images and videos with a `.txt` caption of the same stem beside each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, ReadInstruction, concatenate_datasets

from ..errors import MediaError
from .layouts import SourceRequest, SourceRows

STILL_IMAGES = frozenset(
    {".avif", ".bmp", ".heic", ".heif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff"}
)
"""Endings of files that hold a single picture, as a rule."""

_ANIMATIONS = {".apng", ".gif", ".webp"}
_VIDEOS = {".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts"}
MEDIA_FILES = STILL_IMAGES | _ANIMATIONS | _VIDEOS | {".webm", ".wmv"}
"""Endings of the files that are samples, in folders without a list of them."""


def captions_beside(request: SourceRequest) -> SourceRows | None:
    """Read images and videos at any depth, with a `.txt` caption of the same stem beside each.

    A folder is of this layout when one media file has its caption. Missing captions are null. Links are followed.

    Raises:
        MediaError: If media files share a stem and thereby a caption, or a folder or file cannot be read.
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
    with ThreadPoolExecutor(16) as threads:  # the time goes into waiting for the storage
        texts = list(threads.map(_read_text, [captions.get(stem) for stem in media]))
    columns = {"file_name": _as_paths(files), "caption": _as_captions(texts)}
    words = ", ".join(f"{count} {what}" for what, count in ignored.items() if count)
    return SourceRows(
        dataset=_part(Dataset(pa.table(columns)), request.split),
        layout=f"{len(files)} media files with .txt captions beside them (ignored files: {words or 'none'})",
        root=root,
    )


def _part(dataset: Dataset, split: str) -> Dataset:
    """Return the rows that a split such as `train[:100]` names; files in a folder are all of the split `train`."""
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({"train": len(dataset)})
    except (ValueError, AssertionError) as error:
        raise MediaError(f"A folder of files has the split train, or parts as train[:100]: {error}") from error
    ranges = [range(*slice(part.from_, part.to).indices(len(dataset))) for part in parts]
    if len(ranges) == 1:
        return dataset.select(ranges[0])
    return concatenate_datasets([dataset.select(rows) for rows in ranges])


def _files(folder: str, ignored: Counter[str], above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
    """Yield the visible files below a folder, sorted; a link back to a folder above is not followed again."""
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
            f"{len(shared)} captions in {root} could each belong to several files: {names}; rename or move those that "
            "are no samples, or list the samples in a metadata.jsonl."
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
    """Return a column of strings, or of bytes where some are not UTF-8, so that whoever checks captions names them."""
    cells = pa.array(texts, pa.binary())
    try:
        return cells.cast(pa.string())
    except pa.ArrowInvalid:
        return cells
