"""Run what a forward does to masks and other values that are known, while everything else has a shape alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .trackers import NotCompiled

_MOST = 2**20
"""Numbers of a result, if more than in each of its inputs, beyond which only its shape is kept: no mask of attention
over all tokens is made."""

_FACTORIES = frozenset(
    {torch.ops.aten.ones.default, torch.ops.aten.zeros.default, torch.ops.aten.full.default}
    | {torch.ops.aten.scalar_tensor.default}
    | {torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step}
)
_INDEXING = frozenset(
    {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
)


class KnownValues(NotCompiled, TorchDispatchMode):
    """Compute what follows from constants and tensors with values alone, inside a `FakeTensorMode`.

    A forward may then branch on such values, and index by a mask among them.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INDEXING:
            args = (args[0], _numbered(args[1]), *args[2:])
        if FakeTensor in types:
            return func(*args, **kwargs)
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        if not all(map(_is_known, tensors)) or (not tensors and func not in _FACTORIES):
            return func(*args, **kwargs)
        try:
            shapes = [shape for shape in tree_leaves(func(*args, **kwargs)) if isinstance(shape, torch.Tensor)]
        except (DataDependentOutputException, DynamicOutputShapeException):
            shapes = []
        if sum(tensor.numel() for tensor in shapes) > max([_MOST, *(tensor.numel() for tensor in tensors)]):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _numbered(indices: Sequence[Any]) -> list[Any]:
    """Return indices in which masks with values are replaced by the numbers of what they keep."""
    numbered: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype == torch.bool and _is_known(index):
            with unset_fake_temporarily():
                numbered += index.nonzero().unbind(1)
        else:
            numbered.append(index)
    return numbered


def _is_known(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta
