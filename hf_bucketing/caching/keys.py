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
    keys = stored_column(rows, "latents_key")
    first = pc.list_element(keys, 0) if is_list_type(keys.type) else keys
    has: BoolArray = pc.not_equal(first, "").to_numpy()
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
