"""Whether files can be written, and what to say where they cannot."""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import WriteError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
_FULL_TEXT = re.compile(r"No space left|File too large|quota exceeded|inline_container\.cc", re.IGNORECASE)
"""Torch's and safetensors' writers raise errors of their own; torch's name the place in its code."""


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what says in a `with` block that a disk is full, or a place forbidden, into an error that names `path`.

    Raises:
        WriteError: Instead of that.
    """
    try:
        yield
    except Exception as error:
        reason = None if isinstance(error, WriteError) else explain(error, path)
        if reason is None:
            raise
        raise WriteError(reason) from error


def explain(error: BaseException, path: str | os.PathLike[str] | None = None) -> str | None:
    """Say what keeps files from being written, and what to do; None for other errors."""
    place = path if path is not None else getattr(error, "filename", None)
    where = f"{os.fsdecode(place)} cannot be written" if place is not None else "A file cannot be written"
    code = error.errno if isinstance(error, OSError) else None
    if code in _FULL or (
        (isinstance(error, (OSError, RuntimeError)) or _is_safetensors(error)) and _FULL_TEXT.search(str(error))
    ):
        free = "" if place is None else f" ({_free(Path(os.fsdecode(place)))})"
        return f"{where}: the disk is full, or files may not grow{free}. Free space, or choose another place."
    if code in _FORBIDDEN:
        return f"{where}: {os.strerror(code or 0)}. Make it writable, or choose another place."
    following = error.__cause__ or error.__context__
    return None if following is None else explain(following, path)


def check_writable(*paths: str | os.PathLike[str] | None) -> None:
    """Make the folders that files are to be written to, and try them; call it before hours of work.

    Args:
        paths (path, *optional*): Files that are written later; their folders are made. None is left out.

    Raises:
        WriteError: If a file could not be written, or a folder has its name.
    """
    for path in (Path(path) for path in paths if path):
        if path.is_dir():
            raise WriteError(f"{path} is a folder; name a file.")
        with writing(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise WriteError(f"{path} cannot be written: {error.filename} is a file, not a folder.") from error
            trial = path.parent / f".{uuid.uuid4().hex}.partial"
            trial.touch()
            trial.unlink()


def check_folder_writable(*folders: str | os.PathLike[str] | None) -> None:
    """Do the same for folders that are written later, where only the folder above is made.

    Raises:
        WriteError: If a folder could not be written, or a file has its name.
    """
    for folder in (Path(folder) for folder in folders if folder):
        if folder.exists() and not folder.is_dir():
            raise WriteError(f"{folder} is a file; name a folder.")
        check_writable((folder if folder.is_dir() else folder.absolute().parent) / ".partial")


def _is_safetensors(error: BaseException) -> bool:
    return type(error).__name__ == "SafetensorError"


def _free(path: Path) -> str:
    existing = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
    return f"{shutil.disk_usage(existing).free / 2**20:.0f} MiB are free"
