"""The layout of captions, and of further files such as control videos, that share the stem of their media file."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import IterableDataset

from ..conditions.names import REFERENCE
from ..errors import MediaError
from .layouts import CAPTION_EXTENSION, MEDIA_FILES, MEDIA_OF_KIND, SourceRequest, SourceRows, TextFiles, listed_rows
from .settings import MediaKind

_NUMBERED = re.compile(r"(.+)_(\d+)", re.DOTALL)
"""Stem of one of several references of a file: its own stem, and a number."""

_CAPTIONS_AT_ONCE = 64
"""Captions of a stream that are read at once."""


def sidecar_captions(request: SourceRequest) -> SourceRows | None:
    """Read images and videos at any depth, with a caption of the same stem beside each.

    One media file with a caption makes a folder of this layout. Missing captions are null, or those of the request.
    Links are followed. Each of the request's companions becomes a column of the files of the same stem, at the same
    depth, in another folder; a missing one is null. Of references these are lists, see [`_references`].
    """
    if not request.path.is_dir():
        if request.wants_sidecars:
            raise MediaError(
                f"{request.path} is not a folder, so that it has no captions or other files beside its media; name "
                "the folder, or columns of the table."
            )
        return None
    root = str(request.path)
    extension = "." + (request.caption_extension or CAPTION_EXTENSION).lstrip(".").lower()
    others = [folder for folders in request.companions.values() for folder in folders]
    media, captions, ignored = _media_and_captions(root, extension, aside=others, kind=request.media_kind)
    if not media.keys() & captions.keys() and not (media and request.missing_caption is not None):
        if request.wants_sidecars:
            raise MediaError(
                f"{root} holds {len(media)} media files and {len(captions)} {extension} files, but none of the same "
                "name; correct the folder or `caption_extension`."
            )
        return None
    _refuse_shared_stems(root, media, chosen_by="media_kind")
    ignored[f"{extension} without a media file"] = len(captions.keys() - media.keys())
    folders = [os.path.abspath(folder) for folder in (root, *others)]
    above = root if len(folders) == 1 else os.path.commonpath(folders)  # the caller named them all
    files = [os.path.relpath(paths[0], root) for paths in media.values()]
    captions_of = [captions.get(stem) for stem in media]
    paths = files if above == root else [os.path.relpath(paths[0], above) for paths in media.values()]
    columns = {"file_name": _as_paths(paths)}
    texts = _as_paths(captions_of) if request.streaming else _read_captions(captions_of, request.missing_caption)
    columns["caption"] = texts
    companions, missing = _columns_of_companions(request, files, above=above)
    dataset = listed_rows(request, pa.table(columns | companions))
    if isinstance(dataset, IterableDataset):
        function = partial(_captions_of_batch, missing=request.missing_caption)
        dataset = dataset.map(function, batched=True, batch_size=_CAPTIONS_AT_ONCE)
    words = ", ".join(f"{count} {what}" for what, count in ignored.items() if count)
    return SourceRows(
        dataset=dataset,
        layout=f"{len(files)} media files with {extension} captions beside them (ignored files: {words or 'none'})"
        + missing,
        choose=f'give `caption_extension="{extension}"`',
        root=above,
        texts=TextFiles() if request.streaming else TextFiles.sidecars([*captions.values()], extension=extension),
    )


def _media_and_captions(
    root: str, extension: str, *, aside: Sequence[str], kind: MediaKind
) -> tuple[dict[str, list[str]], dict[str, str], Counter[str]]:
    """Return the media files of a kind and the captions below a folder by their stems, and how many others there are.

    Files in the folders `aside` belong to neither.
    """
    media: dict[str, list[str]] = {}
    captions: dict[str, str] = {}
    ignored: Counter[str] = Counter()
    for path in files_below(root, ignored, aside=set(map(os.path.realpath, aside))):
        stem, ending = os.path.splitext(path)
        if ending.lower() in MEDIA_OF_KIND[kind]:
            media.setdefault(stem, []).append(path)
        elif ending.lower() in MEDIA_FILES:
            ignored["of the other kind"] += 1
        elif ending.lower() == extension:
            captions[stem] = path
        else:
            ignored["of other types"] += 1
    return media, captions, ignored


def _columns_of_companions(
    request: SourceRequest, files: Sequence[str], *, above: str
) -> tuple[dict[str, pa.Array], str]:
    """Return the columns of the files beside media files, `(n,)` each, and how many media files lack one, in words."""
    columns: dict[str, pa.Array] = {}
    missing = ""
    stems = [os.path.splitext(file)[0] for file in files]
    for name, folders in request.companions.items():
        if name == REFERENCE:
            references = _references(folders, stems, str(request.path), above=above)
            columns[name], lacking = _lists_of_paths(references), references.count([])
        else:
            (folder,) = folders
            paths = _companions(folder, stems, str(request.path), above=above)
            columns[name], lacking = _as_paths(paths), paths.count(None)
        missing += f"; {lacking} without a {name}" if lacking else ""
    return columns, missing


def _read_captions(paths: Sequence[str | None], missing: str | None) -> pa.Array:
    """Return the texts of some files, `(n,)`; `missing`, or null, where there is no path."""
    with ThreadPoolExecutor(16) as threads:  # most of the time is spent waiting for storage
        texts = list(threads.map(_read_caption, paths))
    default = None if missing is None else missing.encode()
    return text_column([default if text is None else text for text in texts])


def _captions_of_batch(batch: Mapping[str, Sequence[str | None]], missing: str | None) -> dict[str, list[Any]]:
    """Return the texts of the captions whose paths a batch of a stream holds."""
    return {"caption": _read_captions(batch["caption"], missing).to_pylist()}


def _companions(folder: str, stems: list[str], root: str, *, above: str) -> list[str | None]:
    """Return for each stem the file of that stem in a folder, relative to a folder above it."""
    paths = {stem: files[0] for stem, files in _named_alike(folder, stems, root, above=above).items()}
    return [paths.get(stem) for stem in stems]


def _references(folders: Sequence[str], stems: list[str], root: str, *, above: str) -> list[list[str]]:
    """Return for each stem its files in some folders, in their order, relative to a folder above them.

    In a folder these are the file of that stem, then those with a number behind it, `stem_0`, `stem_1` and so on, by
    their numbers. A file that has the stem of another sample belongs to that one.
    """
    by_folder = [_named_alike(folder, stems, root, above=above, numbered=True) for folder in folders]
    return [[path for files in by_folder for path in files.get(stem, [])] for stem in stems]


def _named_alike(
    folder: str, stems: list[str], root: str, *, above: str, numbered: bool = False
) -> dict[str, list[str]]:
    """Return the files of a folder by the stem of the media whose name they have, relative to a folder above it.

    There is one, or where they may be `numbered` also others.
    """
    if not os.path.isdir(folder):
        raise MediaError(f"The folder {folder} does not exist; correct the path.")
    media, files = set(stems), dict[str, list[str]]()
    for path in files_below(folder, Counter()):
        stem, ending = os.path.splitext(os.path.relpath(path, folder))
        if ending.lower() in MEDIA_FILES:
            files.setdefault(stem, []).append(path)
    owners = {stem: (stem, -1) for stem in files if stem in media}
    for stem in files.keys() - media if numbered else ():
        if (parts := _NUMBERED.fullmatch(stem)) and parts[1] in media:
            owners[stem] = (parts[1], int(parts[2]))
    _refuse_shared_stems(folder, {stem: files[stem] for stem in owners})
    if not owners:
        raise MediaError(f"No file of {folder} has the name of a media file in {root}; correct the folder.")
    alike: dict[str, list[str]] = {}
    for stem, (owner, _) in sorted(owners.items(), key=lambda item: item[1]):
        alike.setdefault(owner, []).append(os.path.relpath(files[stem][0], above))
    return alike


def files_below(
    folder: str,
    ignored: Counter[str],
    *,
    aside: Set[str] = frozenset(),
    above: frozenset[tuple[int, int]] = frozenset(),
) -> Iterator[str]:
    """Yield the visible files below a folder, sorted; do not follow links back to a folder above.

    Args:
        folder (`str`): Where to begin.
        ignored (`Counter`): Counts hidden files and folders.
        aside (set of `str`): Folders, by their real paths, whose files are not yielded.
        above (set of pairs): Device and inode of each folder above.

    Raises:
        MediaError: If a folder cannot be read.
    """
    with _readable(folder):
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        if identity in above or (aside and os.path.realpath(folder) in aside):
            return
        with os.scandir(folder) as entries:
            children = sorted((entry.name, entry.is_dir()) for entry in entries)
    for name, is_folder in children:
        path = os.path.join(folder, name)
        if name.startswith("."):
            ignored["hidden folders" if is_folder else "hidden"] += 1
        elif is_folder:
            yield from files_below(path, ignored, aside=aside, above=above | {identity})
        else:
            yield path


def files_in(folder: Path) -> list[str]:
    """Return the names of the visible files in a folder, sorted.

    Raises:
        MediaError: If the folder cannot be read.
    """
    with _readable(str(folder)), os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_file() and not entry.name.startswith("."))


@contextmanager
def _readable(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MediaError(f"The folder {folder} cannot be read ({error.strerror}); make it readable.") from error


def read_bytes(path: Path, length: int = -1) -> bytes:
    """Return the bytes at the beginning of a text file, by default all of them, without a byte order mark.

    Raises:
        MediaError: If the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(length).removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise MediaError(f"{path} cannot be read ({error.strerror}); make it readable.") from error


def text_column(texts: Sequence[bytes | None]) -> pa.Array:
    """Return a column of strings, or of bytes if some are not UTF-8, so that `check_captions` can name those rows."""
    cells = pa.array(texts, pa.binary())
    try:
        return cells.cast(pa.string())
    except pa.ArrowInvalid:
        return cells


def _refuse_shared_stems(root: str, media: dict[str, list[str]], *, chosen_by: str | None = None) -> None:
    """Refuse files of one stem; a setting by which one kind is chosen is named where that tells all of them apart."""
    shared = [paths for paths in media.values() if len(paths) > 1]
    if not shared:
        return
    names = "; ".join(" and ".join(os.path.relpath(path, root) for path in paths) for paths in shared[:3])
    kinds = [[os.path.splitext(path)[1].lower() in MEDIA_OF_KIND["videos"] for path in paths] for paths in shared]
    advice = "rename or move the files that are not samples, or list the samples in a metadata.jsonl"
    if chosen_by is not None and all(sorted(videos) == [False, True] for videos in kinds):
        advice = f'take one kind of them with `{chosen_by}="videos"` or `{chosen_by}="images"`, or {advice}'
    raise MediaError(f"{len(shared)} captions in {root} could each belong to several files: {names}; {advice}.")


def _read_caption(path: str | None) -> bytes | None:
    return None if path is None else read_bytes(Path(path)).strip()


def _lists_of_paths(files: Sequence[Sequence[str]]) -> pa.Array:
    offsets = [0, *accumulate(map(len, files))]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), _as_paths([path for row in files for path in row]))


def _as_paths(files: Sequence[str | None]) -> pa.Array:
    try:
        return pa.array(files, pa.string())
    except UnicodeEncodeError as error:
        raise MediaError(f"The file name {error.object!r} is not UTF-8; rename the file.") from error
