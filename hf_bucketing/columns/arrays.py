"""What columns hold, and columns of a batch as numpy arrays, whether they come as lists, arrays or Arrow columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Value

from ..errors import ColumnError


def is_text(feature: Any) -> bool:
    """Return whether a feature of datasets is one of Arrow's string types; pandas 3 makes `large_string` of csv."""
    return isinstance(feature, Value) and feature.dtype in ("string", "large_string", "string_view")


def numbers(batch: Mapping[str, Any] | pa.Table, name: str) -> npt.NDArray[Any]:
    """Return a column of numbers, of shape `(n,)`, NaN where there is no value.

    Raises:
        ColumnError: If the column does not hold numbers.
    """
    column = batch[name]
    if isinstance(column, pa.Array):
        column = column.to_numpy(zero_copy_only=False)
    elif isinstance(column, pa.ChunkedArray):
        column = column.to_numpy()
    elif not isinstance(column, np.ndarray):
        column = np.array([np.nan if value is None else value for value in column])
    if column.dtype.kind not in "iuf":
        raise ColumnError(f"The column {name} must hold numbers, got {column.dtype}; cast it first.")
    return column


def whole_numbers(batch: Mapping[str, Any] | pa.Table, name: str) -> npt.NDArray[np.int64]:
    """Return a column of whole numbers as `int64`, of shape `(n,)`, −1 where there is no value.

    Raises:
        ColumnError: If the column holds anything else.
    """
    column = numbers(batch, name)
    if column.dtype.kind in "iu":
        return column.astype(np.int64, copy=False)
    filled = np.nan_to_num(column, nan=-1.0)
    whole = np.rint(filled)
    if not np.array_equal(whole, filled) or np.abs(whole).max(initial=0) >= 2**53:
        raise ColumnError(f"The column {name} must hold whole numbers; round it first.")
    return whole.astype(np.int64)
