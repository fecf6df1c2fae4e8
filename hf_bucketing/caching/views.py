"""The rows of a cached data set: which have latents, and which of their cached views an epoch holds.

An epoch holds another view of each row than the last one, or all views as rows of their own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from datasets import Dataset, Features, Value, concatenate_datasets

from ..buckets.arrays import BoolArray, IntArray, stored_column
from ..columns.apply import with_columns
from ..columns.arrays import column_array, is_list_type
from ..columns.prepared import PreparedDataset
from ..loaders.random_resize import RandomResize, numbers_of_rows
from ..randomness import COLUMN_PREFIX, ROW, Purpose, generator
from ..units import format_bytes
from .store import TensorCache

CACHED_VIEW = f"{COLUMN_PREFIX}cached_view"
"""Column, and list of a batch, of the view that a row stands for, where each view is a row of its own."""

OF_VIEWS = ("height", "width", "bucket_id", "num_tokens")
"""Columns in which such rows differ, beside their view; a plan needs them, and a collator does not."""


def views_in_turn(indices: npt.ArrayLike, *, count: int, seed: int, epoch: int) -> IntArray:
    """Return which of `count` views each row has in an epoch: another one in each, and all in `count` epochs.

    A plan counts the tokens of one size for each row, so that all occurrences of a row in an epoch have one view.

    Args:
        indices (array of `int`, shape `(n,)`): Row numbers in the data set.
        count (`int`): Views of each row.
        seed (`int`): Seed of the view that a row has first.
        epoch (`int`): Epoch.

    Example:
        >>> [views_in_turn(range(4), count=3, seed=0, epoch=epoch).tolist() for epoch in range(3)]
        [[1, 1, 1, 2], [2, 2, 2, 0], [0, 0, 0, 1]]
    """
    rows = np.asarray(indices, np.int64)
    first = numbers_of_rows(generator(Purpose.FIRST_VIEW, seed), rows, per_row=1)[:, 0]
    views: IntArray = ((first * count).astype(np.int64) + epoch) % count
    return views


def resize_of_views(prepared: PreparedDataset) -> RandomResize | None:
    """Return what drew the sizes of the cached views of rows; None if all views of a row have one size."""
    cache = prepared.cache
    if cache is None or cache.random_resize is None:
        return None
    return RandomResize(spec=prepared.spec, min_side=cache.random_resize, seed=cache.views["seed"])


def views_as_rows(prepared: PreparedDataset) -> PreparedDataset:
    """Return cached rows once for each view, with the size and the number of the view.

    The column `hf_bucketing_cached_view` holds the number; sizes are those in packs. All first views come before all
    second ones. The other columns are neither copied nor read.

    Args:
        prepared ([`PreparedDataset`]): Rows in a cache of views whose sizes were drawn.
    """
    resize, cache, rows, table = resize_of_views(prepared), prepared.cache, prepared.dataset, prepared.open_table
    assert resize is not None, "callers look whether sizes were drawn"
    assert cache is not None, "it drew them"
    count = cache.views_per_sample
    views = np.repeat(np.arange(count), len(rows))
    names = ("num_frames", "height", "width", ROW)
    frames, height, width, indices = (np.tile(column_array(rows, name), count) for name in names)
    height, width = resize.sides_of_views(height, width, indices=indices, views=views)
    bucket_id = table.assign(frames, height, width).bucket_id
    num_tokens = table.num_tokens(bucket_id, spec=prepared.spec)
    columns = dict(zip(OF_VIEWS, (height, width, bucket_id, num_tokens), strict=True))
    types = {name: rows.features[name] for name in OF_VIEWS}
    dataset = with_columns(
        concatenate_datasets([rows] * count),
        {**columns, CACHED_VIEW: views},
        features=Features({**types, CACHED_VIEW: Value("int8")}),
    )
    return replace(prepared, dataset=dataset)


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
