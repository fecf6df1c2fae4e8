"""Write files and folders beside their place and rename them, so that each appears only when it is complete."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import BucketingError

PARTIAL = ".partial"
"""Suffix of what is being written, or was when a process was killed."""


def partial_path(path: str | os.PathLike[str]) -> Path:
    """Return where a file or folder is written before it gets its name."""
    path = Path(path)
    return path.with_name(f".{path.name}{PARTIAL}")


@contextmanager
def complete_file(path: str | os.PathLike[str], *, shared: bool = False) -> Iterator[Path]:
    """Yield a path to write to; at the end it replaces `path`, and after an error it is removed.

    A process that is killed leaves an earlier file as it was. Nothing is flushed to the disk: after a power failure,
    a new file may be cut off.

    Args:
        path (path): The file; missing folders above it are made.
        shared (`bool`): Whether several processes may write this file at once. Each then writes under a name of its
            own, which the next writer does not clean up after a kill.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}") if shared else partial_path(path)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def complete_folder(path: str | os.PathLike[str], *, marker: str | None = None) -> Iterator[Path]:
    """Yield an empty folder to write into; at the end it replaces `path`, and after an error it is removed.

    Before the rename, its files are flushed to the disk, so that neither a kill nor a power failure leaves a folder
    that is complete by its name alone.

    Args:
        path (path): The folder; missing folders above it are made.
        marker (`str`, *optional*): A file that every such folder holds. An existing folder without it holds something
            else and is not replaced.

    Raises:
        BucketingError: If `path` exists, is not empty and lacks the marker.
    """
    path, partial = Path(path), partial_path(path)
    if marker is not None and path.exists() and any(path.iterdir()) and not (path / marker).exists():
        raise BucketingError(f"{path} exists and holds no {marker}, so it is not replaced; choose another folder.")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _flush(partial)
        # Renaming the earlier folder takes no time; deleting it may, and then a kill would leave neither.
        earlier = path.with_name(f".{path.name}.replaced")
        shutil.rmtree(earlier, ignore_errors=True)
        if path.exists():
            path.rename(earlier)
        partial.rename(path)
        _flush_entry(path.parent)
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def complete_parts(folder: str | os.PathLike[str], *, last: str | None = None) -> Iterator[Path]:
    """Yield an empty folder to write into; at the end each of its parts replaces that of the same name in `folder`.

    What else `folder` holds stays.

    Args:
        folder (path): Receives the parts; made if it is missing.
        last (`str`, *optional*): The part by which readers know that the others are complete: the earlier one is
            removed before any part is replaced, and the new one comes last.
    """
    folder = Path(folder)
    partial = folder / f".parts{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _flush(partial)
        if last is not None:
            (folder / last).unlink(missing_ok=True)
        for part in sorted(partial.iterdir(), key=lambda part: part.name == last):
            target = folder / part.name
            if target.is_dir():
                shutil.rmtree(target)
            part.replace(target)
        _flush_entry(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Wait until all files below a folder, and their names, are on the disk."""
    for path in (*folder.rglob("*"), folder):
        _flush_entry(path)


def _flush_entry(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if os.name != "posix":  # elsewhere neither folders nor files opened for reading can be flushed
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
