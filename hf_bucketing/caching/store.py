"""Tensors on disk or in an object store, each entry under a key made of all that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from ..errors import CacheError
from ..files import PARTIAL, check_folder_writable, complete_file
from ..media.remote import HOW_TO_REACH, is_url, reason_of

_ENTRY = "entry"

_SEVERAL = "several"
"""Part of a file's header that names what stands for several tensors, with their numbers."""

RULE_VERSION = 1
"""Raised when an entry changes although all parts of its key are the same."""


@dataclass(frozen=True, slots=True)
class TensorCache:
    """Keep tensors in safetensors files, one per entry, in sub-folders by the first two digits of the key.

    A killed writer never leaves a partial entry, and one that a power failure cuts off counts as missing. Several
    processes may write at once. In an object store, an entry is an object, which appears when it is whole.

    Args:
        folder (path): Folder of the entries, made with the first one; or a URL of a protocol that fsspec writes to,
            such as `s3://bucket/cache`.
    """

    folder: str | os.PathLike[str]

    def path(self, key: str) -> str:
        """Return the path or URL of an entry's file.

        Raises:
            CacheError: If the key, which a column of a data set holds, is none and would lead elsewhere.
        """
        if key and not key.isalnum():
            raise CacheError(f"{key!r} is no key of an entry, which has letters and digits; cache the data set again.")
        return posixpath.join(self.folder, key[:2], f"{key}.safetensors")

    def check_writable(self) -> None:
        """Try to write; call it before hours of work. In an object store, an empty object `.writable` stays.

        Raises:
            WriteError: If an entry could not be written to the folder.
            CacheError: If an object could not be written.
        """
        if is_url(self.folder):
            _write_object(posixpath.join(self.folder, ".writable"), b"")
        else:
            check_folder_writable(self.folder)

    def holds(self, key: str) -> bool:
        """Return whether there is an entry; on a disk, one whose file has the length that its header states.

        Raises:
            CacheError: If an object store cannot be reached.
        """
        path = self.path(key)
        try:
            if is_url(path):
                with _object(path) as (file_system, inner):
                    file_system.info(inner)
            else:
                with safe_open(path, framework="pt"):
                    pass
        except (OSError, SafetensorError):
            return False
        return True

    def size(self, key: str) -> int:
        """Return the bytes of an entry, 0 if there is none.

        Raises:
            CacheError: If an object store cannot be reached.
        """
        path = self.path(key)
        try:
            if not is_url(path):
                return os.path.getsize(path)
            with _object(path) as (file_system, inner):
                return int(file_system.size(inner))
        except OSError:
            return 0

    def write(
        self, key: str, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], *, about: Mapping[str, Any]
    ) -> None:
        """Write an entry, or replace it: tensors of any device, and in the file's header JSON values about them.

        A name may stand for a tensor, or for any number of them.
        """
        several = {name: values for name, values in tensors.items() if not isinstance(values, torch.Tensor)}
        flat = {name: values for name, values in tensors.items() if isinstance(values, torch.Tensor)}
        flat |= {_part(name, place): part for name, parts in several.items() for place, part in enumerate(parts)}
        data = {name: tensor.detach().cpu().contiguous() for name, tensor in flat.items()}
        header = {_ENTRY: json.dumps(about)}
        if several:
            header[_SEVERAL] = json.dumps({name: len(parts) for name, parts in several.items()})
        if is_url(self.folder):
            _write_object(self.path(key), save(data, header))
            return
        with complete_file(self.path(key), shared=True) as partial:
            partial.write_bytes(save(data, header))

    def read(self, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return an entry's tensors and what was written about them; where a name stands for several, a tuple.

        Raises:
            CacheError: If the entry is missing, its file cannot be read, or it holds numbers that are not finite.
        """
        path = self.path(key)
        try:
            header, tensors = _read_object(path) if is_url(path) else _read_file(path)
            about, several = json.loads(header[_ENTRY]), json.loads(header.get(_SEVERAL, "{}"))
            broken = sorted({name.partition("/")[0] for name in not_finite(tensors)})
            for name, count in several.items():
                tensors[name] = tuple(tensors.pop(_part(name, place)) for place in range(count))
        except CacheError:
            raise
        except FileNotFoundError as error:
            raise CacheError(f"{path} is missing; run hf_bucketing cache again with the same flags.") from error
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CacheError(
                f"{path} cannot be read ({error}); delete it and run hf_bucketing cache again with the same flags."
            ) from error
        if broken:
            raise CacheError(
                f"{path} holds NaN or infinite numbers ({', '.join(broken)}), which an earlier release stored; delete "
                "it and run hf_bucketing cache again with the same flags, and --on_error reject to leave its "
                "row out."
            )
        return tensors, about

    def sweep(self) -> int:
        """Delete partial files of killed writers and return their number; call it while no process writes."""
        if is_url(self.folder):
            return 0
        left = list(Path(self.folder).glob(f"??/.*{PARTIAL}"))
        for path in left:
            path.unlink()
        return len(left)


def not_finite(tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> list[str]:
    """Return the names of tensors that hold NaN or an infinite number; a name may stand for several."""
    return [
        name
        for name, values in tensors.items()
        if not all(
            bool(tensor.isfinite().all()) for tensor in ([values] if isinstance(values, torch.Tensor) else values)
        )
    ]


def _read_file(path: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the header and the tensors of a file."""
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no dict


def _read_object(url: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the header and the tensors of an object, read by one request."""
    with _object(url) as (file_system, path):
        data = file_system.cat_file(path)
    tensors = load(data)
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]).get("__metadata__", {}), tensors


def _write_object(url: str, data: bytes) -> None:
    with _object(url) as (file_system, path):
        file_system.pipe_file(path, data)


@contextmanager
def _object(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system of a URL and the path in it; what keeps it from being reached becomes a `CacheError`.

    Raises:
        FileNotFoundError: If there is no such object.
    """
    try:
        yield url_to_fs(url)
    except FileNotFoundError:
        raise
    except Exception as error:  # types depend on the protocol and its package
        raise CacheError(f"{url} cannot be reached ({reason_of(error)}); {HOW_TO_REACH}.") from error


def _part(name: str, place: int) -> str:
    return f"{name}/{place}"


def entry_key(**parts: Any) -> str:
    """Return the key of an entry: a hash of all that it depends on, passed as JSON values."""
    parts["rule_version"] = RULE_VERSION
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
