"""Types of numpy arrays, and columns as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def column_values(values: Any, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """Return values as an array; a column of datasets, `dataset[name]`, is read at once and not row by row."""
    if isinstance(values, Sequence) and not isinstance(values, list | tuple):
        stored = _stored(values)
        values = values[:] if stored is None or stored.null_count else stored.to_numpy()
    return np.asarray(values, dtype)


def _stored(column: Any) -> Any:
    """Return the stored cells of a `datasets.Column`; None for other sequences, and for what a transform makes."""
    dataset: Any = getattr(column, "source", None)
    if not hasattr(dataset, "data") or dataset.format["type"] == "custom":
        return None
    return stored_column(dataset, column.column_name)


def stored_column(dataset: Any, name: str) -> Any:
    """Return the stored cells of a column of a `datasets.Dataset`, a `pyarrow.ChunkedArray` of shape `(n,)`.

    Rows that indices choose, after `select`, `shuffle` or `train_test_split`, are taken all at once: datasets gathers
    them one by one, in 6 seconds per million rows against 20 milliseconds here.
    """
    column, indices = dataset.data.column(name), dataset._indices
    return column if indices is None else column.take(indices.column(0))
