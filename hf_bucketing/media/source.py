"""A data set's cell as an openable file: a path, a URL, bytes, or the dictionary of both that datasets uses."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from ..errors import MediaError
from .remote import (
    DECODING_BLOCK,
    HEADER_BLOCK,
    RemoteFile,
    below,
    check_allowed,
    digest_of_parts,
    is_url,
    version,
)

_ENDS = 2**16
"""Bytes at the beginning and at the end of a file in memory that a quick look at its version reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSource:
    """Name an image or video file, in a folder, at a URL or in memory.

    Args:
        path (`str`): Path or URL of the file, or the name of the file in `data`; used in messages.
        data (`bytes`, *optional*): Contents of the file. Without it, `path` is opened.
        remote ([`RemoteFile`], *optional*): The file at a URL, if it is open.
    """

    path: str
    data: bytes | None = field(default=None, repr=False)
    remote: RemoteFile | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_cell(
        cls,
        cell: Any,
        *,
        root: str | os.PathLike[str] | None = None,
        other_roots: Sequence[str] = (),
        name: str = "<bytes>",
    ) -> MediaSource:
        """Make a source from a cell of an `Image(decode=False)`, `Video(decode=False)` or path column.

        Args:
            cell (`str`, `Path`, `bytes`, or `dict` with keys `path` and `bytes`): Bytes take precedence over the path.
            root (path, *optional*): Folder or URL that relative paths start from.
            other_roots (sequence of `str`): Folders and URLs of the other sources of a data set that has several.
            name (`str`): Name in messages of bytes that come without a path.

        Raises:
            MediaError: If the cell is empty or of another type, the file does not exist or is empty, a relative path
                leaves `root`, or `check_allowed` refuses another one. A URL is not opened here.
        """
        file: Any = cell
        data: bytes | None = None
        size: int | None
        if isinstance(cell, dict):
            file, data = cell.get("path"), cell.get("bytes")
        elif isinstance(cell, (bytes, bytearray)):
            file, data = None, bytes(cell)
        if data is not None:
            path, size = str(file or name), len(data)
        elif isinstance(file, (str, os.PathLike)):
            path, size = _existing(os.fsdecode(file), root, other_roots)
        else:
            raise MediaError(
                f"Expected a path, bytes, or a dict with 'path' and 'bytes', got {type(cell).__name__} ({name}). For "
                "a decoded column use dataset.cast_column(column, Image(decode=False)) or Video(decode=False)."
            )
        if size == 0:
            raise MediaError(f"{path} is empty (0 bytes); remove the row or write the file again.")
        return cls(path=path, data=data)

    def version(self, *, quick: bool = False) -> list[Any]:
        """Return what changes with the contents of the file: its length and time of modification, or a hash.

        A time in whole seconds may be that of an archive, which gives it to all its files, so a hash of parts of the
        file joins it. A time with a fraction was set by the program that wrote the file.

        Args:
            quick (`bool`): Whether to ask no server, to read no file, and only the length and the ends of bytes.

        Raises:
            MediaError: If a file cannot be opened, or a URL not be reached.
        """
        if self.data is not None:
            ends = [len(self.data), hashlib.sha256(self.data[:_ENDS] + self.data[-_ENDS:]).hexdigest()]
            return ends if quick else [hashlib.sha256(self.data).hexdigest()]
        if is_url(self.path):
            return [] if quick else version(self.path)
        status = os.stat(self.path)
        told = [status.st_size, status.st_mtime_ns]
        if quick or status.st_mtime_ns % 10**9:
            return told
        with self.open_binary() as file:
            return [*told, digest_of_parts(file, status.st_size)]

    def opened(self, *, headers: bool = False) -> MediaSource:
        """Return the source with its URL opened, once for all that read it next; other sources as they are.

        Args:
            headers (`bool`): Whether only headers will be read, which takes small requests.

        Raises:
            MediaError: If the URL cannot be opened.
        """
        if self.data is not None or self.remote is not None or not is_url(self.path):
            return self
        return replace(self, remote=RemoteFile(self.path, block_size=HEADER_BLOCK if headers else DECODING_BLOCK))

    def open(self) -> str | BinaryIO:
        """Return the path, or a new stream over the bytes or the file at a URL, for `av.open`.

        Raises:
            MediaError: If the URL cannot be opened.
        """
        if self.data is not None:
            return io.BytesIO(self.data)
        remote = self.opened().remote
        return self.path if remote is None else remote.reader()

    def open_binary(self) -> BinaryIO:
        """Open the file for reading bytes.

        Raises:
            MediaError: If the file may not be read.
        """
        file = self.open()
        if not isinstance(file, str):
            return file
        try:
            return open(file, "rb")
        except OSError as error:
            raise MediaError(f"{self.path} cannot be opened ({error.strerror}); make it readable.") from error


def _existing(path: str, root: str | os.PathLike[str] | None, other_roots: Sequence[str]) -> tuple[str, int | None]:
    """Return the path and the number of bytes of a file; None for a URL, which is not opened.

    Links are followed, because the hub's cache consists of them: the owner of the folder made them, while the relative
    path comes from the data set.
    """
    if os.path.isabs(path) or is_url(path):
        check_allowed(path, None if root is None else os.fspath(root), other_roots=other_roots)
    elif root is not None:
        path = below(os.fspath(root), path, other_roots=other_roots)
    if is_url(path):
        return path, None
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        advice = ["pass `root`, the folder that relative paths start from"] if root is None else []
        raise MediaError(f"{path} does not exist.", advice=advice) from error
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise MediaError(f"{path!r} cannot be reached ({error}); correct the path or its permissions.") from error
    if not stat.S_ISREG(status.st_mode):
        raise MediaError(f"{path} is not a file; the column must hold the paths of single files.")
    return path, status.st_size
