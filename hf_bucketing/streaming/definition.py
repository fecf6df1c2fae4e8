"""The definition of a stream: all its steps with their settings, such as seeds, buffers and functions."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from datasets.fingerprint import Hasher


def define(dataset: IterableDataset) -> list[dict[str, Any]]:
    """Return each step of a stream as a `dict`: its kind and its settings; the sources come last.

    Settings are plain values, digests of functions (of their `identity`, where they have one) and data sets, and
    states of random generators. What else a step
    holds, such as a connection, is named by its type only, since nobody could compare it in another run.
    """
    steps, waiting = [], [dataset._ex_iterable]
    while waiting:
        step: Any = waiting.pop(0)
        held = {name: value for name, value in vars(step).items() if "state_dict" not in name}
        waiting += [held.pop("ex_iterable")] if "ex_iterable" in held else []
        waiting += held.pop("ex_iterables", [])
        steps.append({"kind": type(step).__name__, **{name: _plain(value) for name, value in held.items()}})
    return steps


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.random.Generator):
        return _plain(value.bit_generator.state)
    if isinstance(value, Dataset):
        return value._fingerprint
    if isinstance(value, functools.partial):
        return [_plain(part) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, types.MethodType) or not callable(value):
        return f"{type(value).__name__} {getattr(value, '__qualname__', '')}".strip()
    return Hasher.hash(getattr(value, "identity", value))
