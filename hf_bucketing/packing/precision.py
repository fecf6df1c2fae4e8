"""Exact timesteps up to their embedding.

FSDP's mixed precision and DeepSpeed cast all inputs of a model to half precision, in which 999 becomes 1000 and half
steps are lost. The models compute the embedding in float32, so its input must still be exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..errors import PackingError


class _Active(local):
    scalars: Mapping[str, torch.Tensor] | None = None


_active = _Active()


def exact_timesteps(timesteps: torch.Tensor) -> torch.Tensor:
    """Return timesteps in at least float32, in which their embedding is computed.

    Raises:
        PackingError: If the timesteps are in half precision.
    """
    if timesteps.is_floating_point() and timesteps.dtype.itemsize < 4:
        raise PackingError(f"Timesteps must be whole numbers or at least float32, got {timesteps.dtype}.")
    return timesteps if timesteps.is_floating_point() else timesteps.float()


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
    """Hook a transformer so that it gets the inputs that [`exact_scalars`] remembers, even if wrappers cast them."""

    def restore(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        exact = _active.scalars
        if exact is None:
            return None
        restored = {name: value.to(kwargs[name].device) for name, value in exact.items() if name in kwargs}
        return args, {**kwargs, **restored}

    return transformer.register_forward_pre_hook(restore, with_kwargs=True)
