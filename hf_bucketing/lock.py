"""Keep two programs from writing into one folder: a lock of the system, and a file that names who holds it."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .errors import BucketingError, WriteError

if TYPE_CHECKING:
    from filelock import BaseFileLock

logger = logging.getLogger(__name__)


class _Owner(NamedTuple):
    """A process that holds a lock, or did until it was killed."""

    host: str
    pid: int


@contextmanager
def locked(path: Path, *, what: str) -> Iterator[None]:
    """Hold a lock inside a `with` block, and name this host and process in the file `path`.

    The system ends the lock with its process, however that ends and whatever the clock says; a name that is left is
    replaced, with a warning. On another host the system may not know of the lock, so its name alone refuses.

    Args:
        path (`Path`): The file that names the process; missing folders above it are made. The lock itself is on a file
            beside it, as the name must be readable meanwhile.
        what (`str`): What is locked, for messages, such as `"The run in out"`.

    Raises:
        BucketingError: If another process holds the lock, or a process of another host is named.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _acquire(path, what)
    try:
        if path.exists():
            left = _read_owner(path)
            whose = f"process {left.pid} of this host, which has ended" if left else "a process that ended at once"
            logger.warning(f"{what} was locked by {whose}; the lock is taken over.")
        path.write_text(json.dumps(_Owner(socket.gethostname(), os.getpid())._asdict()))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        _release(lock)


def check_unlocked(path: Path, *, what: str) -> None:
    """Raise what [`locked`] would raise, such as before hours of work.

    Raises:
        BucketingError: As [`locked`].
    """
    if path.exists():
        _release(_acquire(path, what))


def _acquire(path: Path, what: str) -> BaseFileLock:
    from filelock import FileLock, Timeout  # which huggingface_hub needs too

    owner = _read_owner(path)
    if owner is not None and owner.host != socket.gethostname():
        raise BucketingError(
            f"{_held(what, owner)}. If that process has ended, remove {path.absolute()}; else wait for its end, or "
            "choose another folder."
        )
    lock = FileLock(path.with_name(f"{path.name}.held"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise BucketingError(
            f"{_held(what, _read_owner(path))}. Wait for its end, end it, or choose another folder."
        ) from None
    except OSError as error:
        raise WriteError(
            f"{lock.lock_file} cannot be locked ({error.strerror}). Choose a writable folder, on a file system that "
            "has locks."
        ) from error
    return lock


def _held(what: str, owner: _Owner | None) -> str:
    return f"{what} is written by " + (f"process {owner.pid} on host {owner.host}" if owner else "another process")


def _release(lock: BaseFileLock) -> None:
    """Remove the file of a lock and release it; filelock does not lock a file that was removed since it was opened."""
    from filelock import UnixFileLock

    if isinstance(lock, UnixFileLock):  # the others remove their file
        Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()


def _read_owner(path: Path) -> _Owner | None:
    """Return the process that a file names; None if there is none, or it was killed before it was named."""
    try:
        values = json.loads(path.read_text())
        return _Owner(values["host"], values["pid"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def owner_tag() -> str:
    """Return a part of a file's name that says which process writes it."""
    return f"{socket.gethostname()}-{os.getpid()}"


def owner_runs(tag: str) -> bool:
    """Return whether the process of an [`owner_tag`] may still write; so may all of other hosts, and other texts."""
    import psutil  # which accelerate needs too

    host, _, pid = tag.rpartition("-")
    return host != socket.gethostname() or not pid.isdigit() or psutil.pid_exists(int(pid))
