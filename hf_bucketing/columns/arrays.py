"""Columns as numpy arrays: of a data set, or of a batch of lists, arrays or Arrow columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Dataset, Features, LargeList, List, Value

from ..buckets.arrays import IntArray, stored_column
from ..errors import ColumnError

SIZE_COLUMNS = ("width", "height", "num_frames")
"""Columns of a sample's size; of a marked row, all hold the number that says why tables reject it."""


def is_text(feature: Any) -> bool:
    """Return whether a feature of datasets has one of Arrow's string types; pandas 3 reads csv as `large_string`."""
    return isinstance(feature, Value) and feature.dtype in ("string", "large_string", "string_view")


def arrow_type(feature: Any) -> pa.DataType:
    """Return the type that Arrow gives the cells of a feature of datasets."""
    return Features({"column": feature}).arrow_schema.field("column").type


def media_kind(feature: Any) -> Literal["path", "bytes", "both"] | None:
    """Return whether cells are `"path"`s, `"bytes"` or dictionaries of `"both"`; None for what holds no media."""
    if is_text(feature):
        return "path"
    kind = arrow_type(feature)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "bytes"
    fields = {field.name for field in kind} if pa.types.is_struct(kind) else set()
    return "both" if fields == {"bytes", "path"} else None


def is_list_type(kind: pa.DataType) -> bool:
    """Return whether the cells of an Arrow column are lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def cell_of_list(feature: Any) -> Any:
    """Return the feature of the items of a column of lists; that of any other column as it is."""
    return feature.feature if isinstance(feature, (List, LargeList)) else feature


def column_array(dataset: Dataset, name: str) -> npt.NDArray[Any]:
    """Return a whole column as an array of shape `(n,)`.

    numpy reads a `Column`, which is what `dataset[name]` returns, row by row: 7 seconds per million rows, against
    milliseconds here, also of rows that indices choose.

    Raises:
        ColumnError: If the data set has no such column.
    """
    if name not in dataset.column_names:
        raise ColumnError(f"The data set has no column {name!r}, only {dataset.column_names}.")
    values: npt.NDArray[Any] = stored_column(dataset, name).to_numpy()
    return values


def column_table(dataset: Dataset, names: Iterable[str]) -> pa.Table:
    """Return whole columns as a table of Arrow, also of rows that indices choose."""
    return pa.table({name: stored_column(dataset, name) for name in names})


def column_batches(dataset: Dataset, name: str) -> Iterator[pa.Array]:
    """Yield a whole column in Arrow arrays of at most 100,000 cells, so that it need not fit in memory."""
    for table in table_batches(dataset, [name], 100_000):
        cells = table[name].combine_chunks()
        yield from cells.chunks if isinstance(cells, pa.ChunkedArray) else [cells]


def table_batches(dataset: Dataset, names: Sequence[str], size: int) -> Iterator[pa.Table]:
    """Yield whole columns in tables of at most `size` rows, also of rows that indices choose."""
    table, indices = dataset.data.table.select(names), dataset._indices
    for start in range(0, len(dataset), size):
        yield table.slice(start, size) if indices is None else table.take(indices.column(0).slice(start, size))


def spread(rows: IntArray, most: int) -> IntArray:
    """Return at most so many of some rows, spread evenly over them."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(np.int64))]


def numbers(batch: Mapping[str, Any] | pa.Table, name: str) -> npt.NDArray[Any]:
    """Return a column as an array of shape `(n,)` with NaN for missing values, or raise if it holds no numbers."""
    column = batch[name]
    if isinstance(column, pa.Array):
        column = column.to_numpy(zero_copy_only=False)
    elif isinstance(column, pa.ChunkedArray):
        column = column.to_numpy()
    elif not isinstance(column, np.ndarray) or column.dtype == object:  # as datasets gave missing values before 4.8
        column = np.array([np.nan if value is None else value for value in column])
    if column.dtype.kind not in "iuf":
        raise ColumnError(f"The column {name} must hold numbers, got {column.dtype}; cast it first.")
    return column


def whole_numbers(batch: Mapping[str, Any] | pa.Table, name: str) -> npt.NDArray[np.int64]:
    """Return a column as an `int64` array of shape `(n,)` with −1 for missing values; raise if they are not whole."""
    column = numbers(batch, name)
    if column.dtype.kind in "iu":
        return column.astype(np.int64, copy=False)
    filled = np.nan_to_num(column, nan=-1.0)
    rounded = np.rint(filled)
    if not np.array_equal(rounded, filled) or np.abs(rounded).max(initial=0) >= 2**53:
        raise ColumnError(f"The column {name} must hold whole numbers; round it first.")
    return rounded.astype(np.int64)
