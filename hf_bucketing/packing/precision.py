"""Timesteps in float32 up to their embedding.

FSDP's mixed precision and DeepSpeed cast all inputs of a model to half precision, in which 999 is 1000 and 0.5 steps
are lost. The models compute the embedding in float32, so what they are given there must still be exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class _Active(local):
    scalars: Mapping[str, torch.Tensor] | None = None


_active = _Active()


@contextmanager
def exact_scalars(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Remember the one-dimensional inputs of a forward, such as timesteps and guidance, inside a `with` block."""
    before = _active.scalars
    _active.scalars = {
        name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor) and value.ndim == 1
    }
    try:
        yield
    finally:
        _active.scalars = before


def keep_scalars_exact(transformer: torch.nn.Module) -> RemovableHandle:
    """Give a transformer the inputs that [`exact_scalars`] remembers, whatever wrappers have cast them to."""

    def restore(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        exact = _active.scalars
        if exact is None:
            return None
        restored = {name: value.to(kwargs[name].device) for name, value in exact.items() if name in kwargs}
        return args, {**kwargs, **restored}

    return transformer.register_forward_pre_hook(restore, with_kwargs=True)
