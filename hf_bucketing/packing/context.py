"""The layout of the pack that is being computed.

A layout kept on the module would belong to another pack when gradient checkpointing computes a block again during
backward: so it is bound into the checkpointed call, and read from a context variable that is set for that call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ..errors import PackingError
from .layout import PackedLayout

_active: ContextVar[PackedLayout | None] = ContextVar("active_layout", default=None)


def active_layout() -> PackedLayout:
    """Return the layout of the pack that is being computed.

    Raises:
        PackingError: If none is: the model was called without `packed_forward`, or something other than diffusers'
            `enable_gradient_checkpointing` computes its blocks again.
    """
    layout = _active.get()
    if layout is None:
        raise PackingError(
            "This transformer has packing enabled, but no pack is being computed. Call it by packed_forward(…), or "
            "disable_packing(transformer) first. For gradient checkpointing use "
            "transformer.enable_gradient_checkpointing(), which packed_forward binds to its pack."
        )
    return layout


@contextmanager
def use_layout(layout: PackedLayout) -> Iterator[None]:
    """Make `layout` the active one inside a `with` block, for people who drive their own forward."""
    token = _active.set(layout)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def bind_checkpoints(model: torch.nn.Module, layout: PackedLayout) -> Iterator[None]:
    """Bind `layout` into every gradient-checkpointed call that `model` makes inside a `with` block."""
    modules: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    originals = [module._gradient_checkpointing_func for module in modules]
    for module, original in zip(modules, originals, strict=True):
        module._gradient_checkpointing_func = _bound(original, layout)
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module._gradient_checkpointing_func = original


def _bound(checkpoint: Any, layout: PackedLayout) -> Callable[..., Any]:
    def checkpoint_with_layout(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def run(*inputs: Any, **options: Any) -> Any:
            with use_layout(layout):
                return block(*inputs, **options)

        return checkpoint(run, *args, **kwargs)

    return checkpoint_with_layout
