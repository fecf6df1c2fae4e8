"""Types of numpy arrays, and columns as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def whole_column(values: Any, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """Return values as an array; a column of datasets, `dataset[name]`, is read at once and not row by row."""
    if isinstance(values, Sequence) and not isinstance(values, list | tuple):
        values = values[:]
    return np.asarray(values, dtype)
