"""Batches of tensors of different lengths, padded to one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import BucketingError, ColumnError


class PadCollator:
    """Stack tensors that differ in length along one dimension, and return the length of each.

    Called with rows of a data set, or with bare tensors, returns a `dict` of stacked tensors with `lengths` (`int64`,
    shape `(B,)`) for [`masked_mse`][hf_bucketing.losses.masked_mse] and masks. Rows that are tuples, such as `(x, y)`,
    return a tuple that ends with the lengths, or with `columns` a `dict`. What is not padded becomes lists.

    Args:
        columns (sequence of `str`, *optional*): Columns to pad, all of one length within a row. Bare tensors get the
            first name, the values of a tuple one name each. By default all columns that hold tensors, arrays or lists
            of numbers; bare tensors are then named `"values"`.
        dim (`int`): Dimension that differs in length, by default the last.
        pad_to_multiple_of (`int`, *optional*): Pad to a multiple of this number, which tensor cores
            prefer.
        boundaries (sequence of `int`, *optional*): Lengths to pad to, such as the boundaries of the length buckets;
            the smallest that is long enough is used. The model then meets few shapes (static graphs, `torch.compile`).
        value (`float`): Value of the padding.

    Raises:
        BucketingError: If both `pad_to_multiple_of` and `boundaries` are given, or a value is below 1.

    Example:
        >>> batch = PadCollator(["audio"], pad_to_multiple_of=4)([{"audio": torch.ones(3)}, {"audio": torch.ones(2)}])
        >>> batch["audio"], batch["lengths"]
        (tensor([[1., 1., 1., 0.],
                [1., 1., 0., 0.]]), tensor([3, 2]))
    """

    def __init__(
        self,
        columns: Sequence[str] | None = None,
        *,
        dim: int = -1,
        pad_to_multiple_of: int | None = None,
        boundaries: Sequence[int] | None = None,
        value: float = 0.0,
    ) -> None:
        if pad_to_multiple_of is not None and boundaries is not None:
            raise BucketingError("Give either `pad_to_multiple_of` or `boundaries`, not both.")
        smallest = min([1 if pad_to_multiple_of is None else pad_to_multiple_of, *(boundaries or [1])])
        if smallest < 1 or (columns is not None and not columns):
            raise BucketingError(
                f"Expected columns, and `pad_to_multiple_of` and `boundaries` of 1 or more; got {columns}, "
                f"{pad_to_multiple_of} and {boundaries}."
            )
        self.columns = None if columns is None else tuple(columns)
        self.dim = dim
        self.pad_to_multiple_of = 1 if pad_to_multiple_of is None else pad_to_multiple_of
        self.boundaries = None if boundaries is None else sorted(boundaries)
        self.value = value

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any] | tuple[Any, ...]:
        """Return the padded batch.

        Raises:
            ColumnError: If a row lacks a column, or `columns` was not given and no column holds arrays.
            BucketingError: If columns differ in length within a row, other dimensions differ between rows, a sample is
                longer than the last boundary, or a tuple has more or fewer values than `columns` has names.
        """
        batch = self._pad([self._by_name(row) for row in rows])
        return batch if self.columns or not isinstance(rows[0], tuple) else tuple(batch.values())

    def _by_name(self, row: Any) -> Mapping[Any, Any]:
        """Return a row's values by name; those of a tuple by their position if no names were given."""
        if isinstance(row, Mapping):
            return row
        if not isinstance(row, tuple):
            return {"values" if self.columns is None else self.columns[0]: row}
        names = range(len(row)) if self.columns is None else self.columns
        if len(names) != len(row):
            raise BucketingError(f"A row has {len(row)} values, but `columns` names {len(names)} of them.")
        return dict(zip(names, row, strict=True))

    def _pad(self, named: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
        columns = self.columns or tuple(name for name in named[0] if any(_is_array(row.get(name)) for row in named))
        if not columns:
            raise ColumnError(f"No column holds tensors, arrays or lists of numbers; there are {sorted(named[0])}.")
        batch: dict[Any, Any] = {name: [row[name] for row in named] for name in named[0]}
        lengths = None
        for name in columns:
            if any(name not in row for row in named):
                raise ColumnError(f"A row lacks {name!r}; it has {sorted(named[0])}.")
            tensors = [torch.as_tensor(row[name]) for row in named]
            lengths_here = [tensor.shape[self.dim] for tensor in tensors]
            if lengths is not None and lengths_here != lengths:
                raise BucketingError(
                    f"{name!r} is {lengths_here} long and {columns[0]!r} {lengths}; name columns of equal length, "
                    f"such as PadCollator([{columns[0]!r}])."
                )
            lengths = lengths_here
            batch[name] = self._stack(name, tensors, self._target(max(lengths_here)))
        batch["lengths"] = torch.tensor(lengths)
        return batch

    def _target(self, longest: int) -> int:
        if self.boundaries is None:
            return -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        fitting = [boundary for boundary in self.boundaries if boundary >= longest]
        if not fitting:
            raise BucketingError(
                f"A sample is {longest} long, but the last boundary is {self.boundaries[-1]}; add one, or leave the "
                "sample out."
            )
        return fitting[0]

    def _stack(self, name: str, tensors: Sequence[torch.Tensor], target: int) -> torch.Tensor:
        dim = self.dim % tensors[0].ndim
        shapes = {tuple(tensor.shape[:dim] + tensor.shape[dim + 1 :]) for tensor in tensors}
        if len(shapes) > 1:
            raise BucketingError(f"{name!r} differs in more than dimension {self.dim}: {sorted(shapes)} beside it.")
        shape = list(tensors[0].shape)
        shape[dim] = target
        stacked = tensors[0].new_full((len(tensors), *shape), self.value)
        for row, tensor in zip(stacked, tensors, strict=True):
            row.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        return stacked


def _is_array(value: Any) -> bool:
    """Return whether a value is a tensor, an array or a list of numbers, which can be padded."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 0
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.dtype.kind in "biuf"
    return isinstance(value, list) and bool(value) and (isinstance(value[0], (int, float)) or _is_array(value[0]))
