"""Files that captions were read from, and whether they were edited since."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """Files that the captions of one source were read from; none of URLs and of data sets on the hub.

    Args:
        files (`tuple` of `str`): Tables, lists and tars, each with the captions of many rows.
        extension (`str`, *optional*): Ending of files beside the media, each with the caption of one; None if there
            are none.
        newest (`int`): Latest time of modification of all of them when they were read, in nanoseconds. Times of one
            file system are compared, and no clock of a machine.
    """

    files: tuple[str, ...] = ()
    extension: str | None = None
    newest: int = 0

    @classmethod
    def of_many(cls, files: Sequence[str]) -> TextFiles:
        """Return the value for files with captions of many rows."""
        return cls(files=tuple(files), newest=max(_changed(files), default=0))

    @classmethod
    def beside(cls, files: Sequence[str], *, extension: str) -> TextFiles:
        """Return the value for files of this ending beside the media."""
        return cls(extension=extension, newest=max(_changed(files), default=0))

    def edited(self, files: Sequence[str]) -> list[str]:
        """Return which of some files were changed since the captions were read; one that is gone was not."""
        return [file for file, time in zip(files, _changed(files), strict=True) if time > self.newest]


def _changed(files: Sequence[str]) -> list[int]:
    """Return the time of modification of each file, 0 for one that is not there."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(_time_of, files))


def _time_of(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0
