"""Keep two programs from writing into one folder: a file that names the host and the process that write."""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .errors import BucketingError

logger = logging.getLogger(__name__)

_CLOCK_STEP = 5.0
"""Seconds by which the start of a process may differ between two readings, after the clock was set."""


class _Owner(NamedTuple):
    """A process: its host, its number, and when it began, because numbers are given again."""

    host: str
    pid: int
    began: float

    @classmethod
    def this_process(cls) -> _Owner:
        """Return this process."""
        return cls(socket.gethostname(), os.getpid(), _began(os.getpid()) or 0.0)

    @property
    def here(self) -> bool:
        """Whether the process is one of this host."""
        return self.host == socket.gethostname()

    @property
    def may_live(self) -> bool:
        """Whether the process runs, or is on another host, of which nothing is known."""
        began = _began(self.pid) if self.here else self.began
        return began is not None and abs(began - self.began) < _CLOCK_STEP


@contextmanager
def locked(path: Path, *, what: str) -> Iterator[None]:
    """Hold the lock file `path` inside a `with` block.

    The lock of a process of this host that has ended is taken over, with a warning.

    Args:
        path (`Path`): The lock file; missing folders above it are made.
        what (`str`): What is locked, for messages, such as `"The run in out"`.

    Raises:
        BucketingError: If another process holds the lock, or one of another host, which may have ended.
    """
    own = _Owner.this_process()
    path.parent.mkdir(parents=True, exist_ok=True)
    while not _created(path, own):
        check_unlocked(path, what=what)
        _remove_stale(path, what)
    try:
        yield
    finally:
        if _read_owner(path) == own:
            path.unlink()


def check_unlocked(path: Path, *, what: str) -> None:
    """Raise what [`locked`] would raise, such as before hours of work.

    Raises:
        BucketingError: As [`locked`].
    """
    owner = _read_owner(path)
    if owner is None or not owner.may_live:
        return
    if owner.here:
        way = "Wait for its end, end it, or choose another folder"
    else:
        way = f"If that process has ended, remove {path.absolute()}; else wait for its end, or choose another folder"
    raise BucketingError(f"{what} is written by process {owner.pid} on host {owner.host}. {way}.")


def _remove_stale(path: Path, what: str) -> None:
    """Remove the lock of a process that has ended; if another process did so before and has locked anew, not that."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    owner = _read_owner(aside)
    if owner is not None and owner.may_live:
        aside.rename(path)
        return
    aside.unlink()
    whose = f"process {owner.pid} of this host, which has ended" if owner else "a process that ended at once"
    logger.warning(f"{what} was locked by {whose}; the lock is taken over.")


def _created(path: Path, own: _Owner) -> bool:
    try:
        with path.open("x") as file:
            file.write(json.dumps(own._asdict()))
    except FileExistsError:
        return False
    return True


def _read_owner(path: Path) -> _Owner | None:
    """Return the process that a lock file names; None if there is none, or it was killed before it was named."""
    try:
        return _Owner(**json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _began(pid: int) -> float | None:
    """Return when a process of this host began, in seconds; None if it does not run."""
    import psutil  # which accelerate needs too

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def owner_tag() -> str:
    """Return a part of a file's name that says which process writes it."""
    return f"{socket.gethostname()}-{os.getpid()}"


def owner_runs(tag: str) -> bool:
    """Return whether the process of an [`owner_tag`] may still write; so may all of other hosts, and other texts."""
    host, _, pid = tag.rpartition("-")
    return host != socket.gethostname() or not pid.isdigit() or _began(int(pid)) is not None
