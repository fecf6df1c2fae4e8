"""Write files and folders so that each appears only when it is complete, and name what keeps them from it."""

from __future__ import annotations

import errno
import glob
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from .errors import BucketingError, WriteError
from .lock import locked, owner_runs, owner_tag

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
_FULL_TEXT = re.compile(r"No space left|File too large|quota exceeded|inline_container\.cc", re.IGNORECASE)
"""Torch's and safetensors' writers raise errors of their own; torch's name the place in its code."""


PARTIAL = ".partial"
"""Suffix of what is being written, or was when a process was killed."""

_ASIDE = ".replaced"
"""Suffix of what is being deleted, or was when a process was killed."""


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

    None among the paths is ignored.

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


def existing_places(path: str, *, folder: str | os.PathLike[str]) -> list[str]:
    """Return where a path that a file names exists: beginning at the file's folder, and at the working directory.

    Args:
        path (`str`): The path, relative or whole.
        folder (path): The folder of the file that names it.

    Returns:
        `list` of `str`: Whole paths, none of which is the same file as another.
    """
    places = dict.fromkeys(os.path.abspath(place) for place in (os.path.join(folder, path), path))
    existing = [place for place in places if os.path.exists(place)]
    return existing[:1] if len(existing) > 1 and os.path.samefile(*existing) else existing


def partial_path(path: str | os.PathLike[str]) -> Path:
    """Return where a folder is written before it gets its name: the same for all processes of a run."""
    path = Path(path)
    return path.with_name(f".{path.name}{PARTIAL}")


@contextmanager
def complete_file(path: str | os.PathLike[str], *, shared: bool = False) -> Iterator[Path]:
    """Yield a path to write to; at the end it replaces `path`, and after an error it is removed.

    It has the permissions of any new file, by the umask, whatever library wrote it. Each process writes under a name
    of its own. One that is killed leaves an earlier file as it was, and the next one of this host removes what it had
    written. Nothing is flushed to the disk: after a power failure, a new file may be cut off.

    Args:
        path (path): The file; missing folders above it are made.
        shared (`bool`): Whether threads may write this file at once too, or its folder holds too many files to look
            for what a killed process left, which then stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex if shared else owner_tag()}{PARTIAL}")
    if not shared:
        _remove_left_files(path)
    try:
        with writing(path):
            yield partial
            _open_to_others([partial])
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def complete_folder(path: str | os.PathLike[str], *, marker: str | None = None, lock: bool = True) -> Iterator[Path]:
    """Yield an empty folder to write into; at the end it replaces `path`, and after an error it is removed.

    Before the rename, its files are flushed to the disk, so that neither a kill nor a power failure leaves a folder
    that is complete by its name alone.

    Args:
        path (path): The folder; missing folders above it are made.
        marker (`str`, *optional*): A file that every such folder holds. An existing folder without it holds something
            else and is not replaced.
        lock (`bool`): Whether another program that writes this folder meanwhile is refused; otherwise the caller
            holds a lock.

    Raises:
        BucketingError: If `path` exists, is not empty and lacks the marker, or another program writes it.
    """
    path, partial = Path(path), partial_path(path)
    if marker is not None and path.exists() and any(path.iterdir()) and not (path / marker).exists():
        raise BucketingError(f"{path} exists and holds no {marker}, so it is not replaced; choose another folder.")
    with locked(path.with_name(f".{path.name}.lock"), what=str(path)) if lock else nullcontext():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            with writing(path):
                yield partial
                _open_to_others(partial.rglob("*"))
                _flush(partial)
            earlier = _put_aside(path)
            partial.rename(path)
            _flush_entry(path.parent)
            shutil.rmtree(earlier, ignore_errors=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _open_to_others(paths: Iterable[Path]) -> None:
    """Give files that nobody else may read the permissions that a new file beside them has, by the umask.

    safetensors writes through a temporary file that is its owner's alone.
    """
    closed = [path for path in paths if stat.S_ISREG(mode := path.lstat().st_mode) and not mode & 0o077]
    if not closed:
        return
    trial = closed[0].with_name(f".{uuid.uuid4().hex}{PARTIAL}")
    trial.touch()
    mode = stat.S_IMODE(trial.stat().st_mode)
    trial.unlink()
    for path in closed:
        path.chmod(mode)


def _remove_left_files(path: Path) -> None:
    """Remove what processes that were killed while they wrote a file have left of it."""
    prefix = f".{path.name}."
    for left in path.parent.glob(f"{glob.escape(prefix)}*{PARTIAL}"):
        if not owner_runs(left.name.removeprefix(prefix).removesuffix(PARTIAL)):
            left.unlink(missing_ok=True)


def remove_folders(paths: Iterable[Path]) -> None:
    """Delete folders of one kind, and those of that kind whose deletion a crash cut short.

    A folder that is only half deleted no longer has its name. The kind is the name up to its last hyphen.
    """
    for path in paths:
        kind = path.name.rpartition("-")[0]
        _put_aside(path)
        for left in path.parent.glob(f".{kind}-*{_ASIDE}"):
            shutil.rmtree(left)


def _put_aside(path: Path) -> Path:
    """Rename a folder if there is one, which takes no time; deleting it may, and a crash would leave a part of it."""
    aside = path.with_name(f".{path.name}{_ASIDE}")
    shutil.rmtree(aside, ignore_errors=True)
    if path.exists():
        path.rename(aside)
    return aside


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
        with writing(folder):
            yield partial
            _open_to_others(partial.rglob("*"))
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
