"""A data set's cell as an openable file: a path, bytes, or the dictionary of both that datasets uses."""

from __future__ import annotations

import io
import os
import stat
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ..errors import MediaError


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSource:
    """Name an image or video file, in a folder or in memory.

    Args:
        path (`str`): Path of the file, or the name of the file in `data`; used in messages.
        data (`bytes`, *optional*): Contents of the file. Without it, `path` is opened.
    """

    path: str
    data: bytes | None = field(default=None, repr=False)

    @classmethod
    def from_cell(cls, cell: Any, *, root: str | os.PathLike[str] | None = None, name: str = "<bytes>") -> MediaSource:
        """Make a source from a cell of an `Image(decode=False)`, `Video(decode=False)` or path column.

        Args:
            cell (`str`, `Path`, `bytes`, or `dict` with keys `path` and `bytes`): Bytes take precedence over the path.
            root (path, *optional*): Folder that relative paths start from.
            name (`str`): Name in messages of bytes that come without a path.

        Raises:
            MediaError: If the cell is empty or of another type, the file does not exist or is empty, or a relative
                path leaves `root`.
        """
        file: Any = cell
        data = None
        if isinstance(cell, dict):
            file, data = cell.get("path"), cell.get("bytes")
        elif isinstance(cell, (bytes, bytearray)):
            file, data = None, bytes(cell)
        if data is not None:
            path, size = str(file or name), len(data)
        elif isinstance(file, (str, os.PathLike)):
            path, size = _existing(os.fsdecode(file), root)
        else:
            raise MediaError(
                f"Expected a path, bytes, or a dict with 'path' and 'bytes', got {type(cell).__name__} ({name}). For "
                "a decoded column use dataset.cast_column(column, Image(decode=False)) or Video(decode=False)."
            )
        if size == 0:
            raise MediaError(f"{path} is empty (0 bytes); remove the row or write the file again.")
        return cls(path=path, data=data)

    def open(self) -> str | io.BytesIO:
        """Return the path, or a new stream over the bytes, for `av.open`."""
        return self.path if self.data is None else io.BytesIO(self.data)

    def open_binary(self) -> BinaryIO:
        """Open the file for reading bytes.

        Raises:
            MediaError: If the file may not be read.
        """
        if self.data is not None:
            return io.BytesIO(self.data)
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise MediaError(f"{self.path} cannot be opened ({error.strerror}); make it readable.") from error


def _existing(path: str, root: str | os.PathLike[str] | None) -> tuple[str, int]:
    """Return the path and the number of bytes of a file.

    Links are followed, because the hub's cache consists of them: the owner of the folder made them, while the relative
    path comes from the data set.
    """
    if root is not None and not os.path.isabs(path):
        inner = os.path.normpath(path)
        if inner == os.pardir or inner.startswith(os.pardir + os.sep):
            raise MediaError(f"The relative path {path} leaves its root {root}; only files below the root are read.")
        path = os.path.join(root, inner)
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
