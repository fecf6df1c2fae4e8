"""What the keys of a cached data set say: which rows have latents, and how many bytes these take."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset

from ..buckets.arrays import BoolArray, stored_column
from ..columns.arrays import is_list_type
from ..columns.prepared import PreparedDataset
from ..units import format_bytes
from .store import TensorCache

_MEASURED = 200
"""Rows whose entries are measured, spread evenly; few, as an object store answers one request for each."""


def has_latents(rows: Dataset) -> BoolArray:
    """Return whether each row has cached latents, `(n,)`; rejected and unreadable ones have none."""
    return has_keys(rows, "latents_key")


def has_keys(rows: Dataset, column: str) -> BoolArray:
    """Return whether each row has all keys of a column, `(n,)`: its cell, or all in its lists, are not empty."""
    keys = stored_column(rows, column).combine_chunks()
    has, row_of = np.ones(len(keys), np.bool_), np.arange(len(keys))
    while is_list_type(keys.type):
        row_of, keys = row_of[pc.list_parent_indices(keys).to_numpy()], pc.list_flatten(keys)
    has[row_of[pc.equal(keys, "").to_numpy(zero_copy_only=False)]] = False
    return has


def describe_latents(prepared: PreparedDataset) -> str:
    """Return the views and the size of the latents of a cached data set, as `"6 rows in 2 views, about 0.07 MiB"`.

    Entries that rows or views share count for each, and missing ones nothing.
    """
    assert prepared.cache is not None, "only cached data sets have latents"
    rows = np.flatnonzero(has_latents(prepared.dataset))
    measured = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _MEASURED)).astype(np.int64))]
    cells = prepared.dataset.select_columns(["latents_key"]).select(measured)["latents_key"]
    cache = TensorCache(prepared.cache.folder)
    keys = [key for cell in cells for key in ([cell] if isinstance(cell, str) else cell)]
    mean = sum(map(cache.size, keys)) / max(len(measured), 1)
    views = prepared.cache.views_per_sample
    return f"{len(rows):,} rows in {views} view{'s' * (views > 1)}, about {format_bytes(len(rows) * mean)}"
