"""Tensors on disk, each entry under a key made of all that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..errors import CacheError
from ..files import PARTIAL, complete_file

_ENTRY = "entry"

RULE_VERSION = 1
"""Raised when an entry changes although all parts of its key are the same."""


@dataclass(frozen=True, slots=True)
class TensorCache:
    """Keep tensors in safetensors files, one per entry, in sub-folders by the first two digits of the key.

    A killed writer never leaves a partial entry, and one that a power failure cuts off counts as missing. Several
    processes may write at once.

    Args:
        folder (path): Folder of the entries, made with the first one.
    """

    folder: str | os.PathLike[str]

    def path(self, key: str) -> Path:
        """Return the path of an entry's file."""
        return Path(self.folder, key[:2], f"{key}.safetensors")

    def holds(self, key: str) -> bool:
        """Return whether there is an entry whose file has the length that its header states."""
        try:
            with safe_open(self.path(key), framework="pt"):
                return True
        except (OSError, SafetensorError):
            return False

    def write(self, key: str, tensors: Mapping[str, torch.Tensor], *, about: Mapping[str, Any]) -> None:
        """Write an entry, or replace it: tensors of any device, and in the file's header JSON values about them."""
        data = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with complete_file(self.path(key), shared=True) as partial:
            partial.write_bytes(save(data, {_ENTRY: json.dumps(about)}))

    def read(self, key: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return an entry's tensors and what was written about them.

        Raises:
            CacheError: If the entry is missing or its file cannot be read.
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
        """Delete partial files of killed writers and return their number; call it while no process writes."""
        left = list(Path(self.folder).glob(f"??/.*{PARTIAL}"))
        for path in left:
            path.unlink()
        return len(left)


def entry_key(**parts: Any) -> str:
    """Return the key of an entry: a hash of all that it depends on, passed as JSON values."""
    parts["rule_version"] = RULE_VERSION
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
