"""Refuse sharded states in a checkpoint whose pickles could run code."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import load
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ..loaders.trust import only_values

_CLASSES: tuple[Any, ...] = (
    parts.Metadata,
    parts.MetadataIndex,
    parts.StorageMeta,
    parts.BytesStorageMetadata,
    parts.TensorStorageMetadata,
    parts.TensorProperties,
    parts.ChunkStorageMetadata,
    parts._MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
    torch.serialization._get_layout,
    type(Path()),
)
_ALLOWED = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES}


def refuse_code_in_shards(folder: Path) -> None:
    """Check the states of a checkpoint that FSDP saved in parts (`fsdp_state_dict_type: SHARDED_STATE_DICT`).

    torch unpickles whatever their indices hold, and their values that are not tensors. Call it before
    `accelerator.load_state`.

    Raises:
        BucketingError: If an index or a value holds more than plain values, tensors and numpy arrays.
    """
    for index in sorted(folder.glob("*/.metadata")):
        with only_values(index), index.open("rb") as file:
            state = _IndexUnpickler(file).load()
        for key, place in (state.storage_data or {}).items():
            if isinstance(state.state_dict_metadata[key.fqn], parts.BytesStorageMetadata):
                path = index.parent / place.relative_path
                with only_values(path), path.open("rb") as file:
                    file.seek(place.offset)
                    load(io.BytesIO(file.read(place.length)), map_location="cpu")


class _IndexUnpickler(pickle.Unpickler):
    """Reads an index: the names, dtypes and shapes of tensors, and their places in files."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"An index of parts has no {module}.{name}.")
        return _ALLOWED[module, name]
