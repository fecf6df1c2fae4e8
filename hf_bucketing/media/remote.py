"""Files at URLs (`https://`, `hf://`, `s3://`, …), opened by fsspec and read in blocks, only where they are needed."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, BinaryIO

from fsspec.core import url_to_fs

from ..errors import MediaError
from ..hub import cache_folders

HEADER_BLOCK = 2**16
"""Bytes per request for headers, which lie at the beginning or the end of a file."""

DECODING_BLOCK = 2**20
"""Bytes per request for decoding."""

HOW_TO_REACH = (
    "correct the URL, put its credentials into the environment, or install the package of its protocol, such as s3fs "
    "or gcsfs"
)

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")

_DIGESTS = "ETag", "etag", "Content-MD5", "Digest", "md5Hash", "blob_id"
_TIMES = "Last-Modified", "LastModified", "last_modified", "mtime", "created"
"""Names under which the file systems of fsspec tell the version of a file, in order of preference."""

_PARTS, _PART = 5, 2**14
"""Parts of a file that are hashed where nothing else identifies its contents, spread evenly, and their bytes."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL, which fsspec opens."""
    return _URL.match(os.fspath(path)) is not None


ALLOWED_PATHS = "HF_BUCKETING_ALLOWED_PATHS"
"""Environment variable with folders and URLs, separated by commas, below which any data set may name files.

It belongs to the person who runs a script, so that no data set can grant itself more, also not a prepared one.
"""

_ANYWHERE = re.compile(r"(https?|hf)://(?!.*::)", re.IGNORECASE)
"""URLs that a data set may name anywhere: servers, and the hub; not chains of file systems, such as zip::https."""


def check_allowed(path: str, root: str | None, *, other_roots: Sequence[str] = ()) -> None:
    """Check that a data set may name an absolute path or a URL: below its root, on a server, or of the hub.

    Without a root it is the caller who names the path.

    Args:
        path (`str`): Absolute path, or URL.
        root (`str`, *optional*): Folder or URL of the data set.
        other_roots (sequence of `str`): Folders and URLs of the other sources of a data set that has several.

    Raises:
        MediaError: If it lies elsewhere, and below none of the paths in `HF_BUCKETING_ALLOWED_PATHS`.
    """
    if root is None or _ANYWHERE.match(path):
        return
    more = [part.strip() for part in os.environ.get(ALLOWED_PATHS, "").split(",")]
    if not any(part and _lies_below(path, part) for part in (root, *other_roots, *cache_folders(), *more)):
        outside = "is a URL of another protocol than https and hf" if is_url(path) else f"lies outside of {root}"
        raise MediaError(
            f"{path} {outside}, and a data set may name only files below its own folder, and on servers. If you trust "
            f"it, name the folder or the beginning of the URL in the environment variable {ALLOWED_PATHS}, such as "
            f"{ALLOWED_PATHS}={_folder_of(path)}."
        )


def _lies_below(path: str, folder: str) -> bool:
    """Return whether a path or URL lies in a folder or URL, or at any depth below it, as written or behind links."""
    if is_url(path) != is_url(folder) or "::" in path:
        return False
    if not is_url(path):
        return _is_inside(os.path.abspath(path), os.path.abspath(folder)) or _is_inside(
            os.path.realpath(path), os.path.realpath(folder)
        )
    (protocol, _, inner), (folder_protocol, _, outer) = (part.partition("://") for part in (path, folder))
    inside = posixpath.normpath(f"/{inner}") + "/"
    return protocol.lower() == folder_protocol.lower() and inside.startswith(posixpath.normpath(f"/{outer}") + "/")


def _is_inside(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def below(root: str, path: str, *, other_roots: Sequence[str] = ()) -> str:
    """Return the path or URL of a file below a root, which is a folder or a URL, or below another one.

    Raises:
        MediaError: If the path leaves the root for another place.
    """
    join, normal = (posixpath.join, posixpath.normpath) if is_url(root) else (os.path.join, os.path.normpath)
    inner = normal(path)
    if inner == os.pardir or inner.startswith((os.pardir + os.sep, os.pardir + posixpath.sep)):
        joined = os.path.normpath(os.path.join(root, inner))
        if not is_url(root) and any(_lies_below(joined, other) for other in other_roots):
            return joined
        raise MediaError(f"The relative path {path} leaves its root {root}; only files below the root are read.")
    return join(root, inner)


def version(url: str) -> list[Any]:
    """Return the size of a file and what its server tells of its version, such as an ETag.

    If that is nothing, or a time in whole seconds, a hash of parts of the file joins it, as for files on disk.

    Raises:
        MediaError: If the file cannot be reached.
    """
    with _reaching(url):
        file_system, path = url_to_fs(url)
        info = file_system.info(path)
    digest, time = (next((info[name] for name in names if info.get(name)), "") for names in (_DIGESTS, _TIMES))
    if digest or (isinstance(time, float) and time % 1):
        return [info.get("size"), str(digest or time)]
    remote = RemoteFile(url, block_size=HEADER_BLOCK)
    return [info.get("size"), str(time), digest_of_parts(remote.reader(), remote.size)]


def digest_of_parts(file: BinaryIO, size: int) -> str:
    """Return a hash of the beginning, the end and some parts between them of a file of `size` bytes."""
    digest = hashlib.sha256()
    for place in range(_PARTS):
        file.seek(max(0, size - _PART) * place // (_PARTS - 1))
        digest.update(file.read(_PART))
    return digest.hexdigest()


class RemoteFile:
    """A file at a URL, opened once for any number of readers.

    Blocks that were read last are kept. From a server that sends only whole files, the whole file is kept.

    Args:
        url (`str`): URL of a protocol that fsspec knows; some need a package, such as `s3fs`.
        block_size (`int`): Bytes per request.

    Raises:
        MediaError: If the file cannot be reached, or no package for its protocol is installed.
    """

    def __init__(self, url: str, *, block_size: int) -> None:
        self.url = url
        self._lock = Lock()
        with _reaching(url):
            self._file_system, self._path = url_to_fs(url)
            self._file: Any = self._file_system.open(self._path, "rb", block_size=block_size, cache_type="blockcache")
        self.size = self._or_after_download(lambda: self._file.seek(0, io.SEEK_END))
        if not self.size:
            raise MediaError(f"{url} is empty (0 bytes); remove the row or write the file again.")

    def reader(self) -> BinaryIO:
        """Return a file object with a position of its own, at the beginning."""
        return io.BufferedReader(_Reader(self))

    def read(self, start: int, length: int) -> bytes:
        """Return at most `length` bytes from the byte `start` on.

        Raises:
            MediaError: If the server fails.
        """

        def read() -> bytes:
            self._file.seek(start)
            return bytes(self._file.read(max(0, min(length, self.size - start))))

        with self._lock:
            return self._or_after_download(read)

    def _or_after_download(self, call: Any) -> Any:
        """Call a function of the open file; read the whole file first if its server cannot send parts."""
        with _reaching(self.url):
            try:
                return call()
            except ValueError:
                if isinstance(self._file, io.BytesIO):
                    raise
            self._file = io.BytesIO(self._file_system.cat_file(self._path))
            return call()


class _Reader(io.RawIOBase):
    def __init__(self, file: RemoteFile) -> None:
        self._remote = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._remote.read(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._remote.size}[whence]
        if start + offset < 0:
            raise OSError(22, "Seek before the beginning of the file")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position


@contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Turn every error of a file system into a `MediaError`: their types depend on the protocol and its package."""
    try:
        yield
    except MediaError:
        raise
    except ImportError as error:
        raise MediaError(f"{url} cannot be opened: {error}; install that package, or download the file.") from error
    except Exception as error:
        raise MediaError(
            f"{url} cannot be read ({reason_of(error)}); {HOW_TO_REACH}, or remove the row if the file is gone."
        ) from error


def reason_of(error: BaseException) -> str:
    """Return the first cause of an error in one line; file systems of fsspec wrap those of their clients."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
