"""Tensors on disk, each entry under a key made of all that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..errors import CacheError
from ..files import PARTIAL, complete_file

_ENTRY = "entry"

_SEVERAL = "several"
"""Part of a file's header that names what stands for several tensors, with their numbers."""

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
        with complete_file(self.path(key), shared=True) as partial:
            partial.write_bytes(save(data, header))

    def read(self, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return an entry's tensors and what was written about them; where a name stands for several, a tuple.

        Raises:
            CacheError: If the entry is missing or its file cannot be read.
        """
        path = self.path(key)
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                about, several = json.loads(header[_ENTRY]), json.loads(header.get(_SEVERAL, "{}"))
                tensors: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no dict
                for name, count in several.items():
                    tensors[name] = tuple(tensors.pop(_part(name, place)) for place in range(count))
                return tensors, about
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


def _part(name: str, place: int) -> str:
    return f"{name}/{place}"


def entry_key(**parts: Any) -> str:
    """Return the key of an entry: a hash of all that it depends on, passed as JSON values."""
    parts["rule_version"] = RULE_VERSION
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
