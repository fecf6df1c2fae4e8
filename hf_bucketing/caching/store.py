"""Tensors on disk, each entry under a key that says all it depends on."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..errors import CacheError
from ..files import writing

_ENTRY = "entry"
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class TensorCache:
    """A folder of safetensors files, one per entry, in sub-folders by the first two digits of the key.

    An entry is written beside its place and renamed, so whoever is killed, none is half there; several processes may
    write at once.

    Args:
        folder (`Path`): Made with the first entry.
    """

    folder: Path

    def path(self, key: str) -> Path:
        """Return where an entry lies."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def holds(self, key: str) -> bool:
        """Return whether there is an entry, and of the length that its header says."""
        try:
            with safe_open(self.path(key), framework="pt"):
                return True
        except (OSError, SafetensorError):
            return False

    def write(self, key: str, tensors: Mapping[str, torch.Tensor], *, about: Mapping[str, Any]) -> None:
        """Write an entry, or replace it.

        Args:
            key (`str`): From [`entry_key`].
            tensors (mapping of `str` to `torch.Tensor`): On any device.
            about (mapping): JSON values, kept in the file's header.
        """
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{key}.{uuid.uuid4().hex}{_PARTIAL}")
        data = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with writing(path):
            partial.write_bytes(save(data, {_ENTRY: json.dumps(about)}))
            os.replace(partial, path)

    def read(self, key: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return an entry's tensors and what was written about them.

        Raises:
            CacheError: If the entry is missing, cut off or otherwise no such file.
        """
        path = self.path(key)
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})[_ENTRY])
                return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118, it is no dict
        except FileNotFoundError as error:
            raise CacheError(f"{path} is missing; run scripts/cache_latents.py again with the same flags.") from error
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CacheError(
                f"{path} cannot be read ({error}); delete it and run scripts/cache_latents.py again with the same "
                "flags."
            ) from error

    def sweep(self) -> int:
        """Delete what killed writers left; only while nobody writes. Returns the number of files."""
        left = list(self.folder.glob(f"??/.*{_PARTIAL}"))
        for path in left:
            path.unlink()
        return len(left)


def entry_key(**parts: Any) -> str:
    """Return the key of an entry: a hash of all that it depends on, given as JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
