"""The cached views that an epoch holds of each row: another one in each epoch, or all as rows of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from datasets import concatenate_datasets

from ..buckets.arrays import IntArray
from ..columns.apply import map_columns, with_columns
from ..columns.arrays import column_array
from ..columns.buckets import BucketColumns
from ..columns.prepared import PreparedDataset
from ..loaders.random_resize import RandomResize, numbers_of_rows
from ..randomness import Purpose, generator

CACHED_VIEW = "cached_view"
"""Column, and list of a batch, of the view that a row stands for, where each view is a row of its own."""


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
    first = numbers_of_rows(generator(Purpose.FIRST_VIEW, seed), rows, each=1)[:, 0]
    views: IntArray = ((first * count).astype(np.int64) + epoch) % count
    return views


def resize_of_views(prepared: PreparedDataset) -> RandomResize | None:
    """Return what drew the sizes of the cached views of rows; None if all views of a row have one size."""
    cache = prepared.cache
    if cache is None or cache.random_resize is None:
        return None
    return RandomResize(spec=prepared.spec, min_side=cache.random_resize, seed=cache.views["seed"])


def views_as_rows(prepared: PreparedDataset) -> PreparedDataset:
    """Return cached rows once for each view, with the view's size in packs, and its number as `cached_view`.

    The first views are the rows as they are, rejected ones among them, of which there are no others. Stored columns
    are not copied.

    Args:
        prepared ([`PreparedDataset`]): Rows in a cache of views whose sizes were drawn.
    """
    resize, cache, rows = resize_of_views(prepared), prepared.cache, prepared.dataset
    assert resize is not None, "callers look whether sizes were drawn"
    assert cache is not None, "it drew them"
    usable = np.flatnonzero(column_array(rows, "num_tokens") > 0)
    others = rows if len(usable) == len(rows) else rows.select(usable)
    views = np.repeat(np.arange(cache.views_per_sample), [len(rows)] + [len(others)] * (cache.views_per_sample - 1))
    dataset = concatenate_datasets([rows] + [others] * (cache.views_per_sample - 1))
    height, width, indices = (column_array(dataset, name) for name in ("height", "width", "index"))
    drawn = resize.sides_of_views(height, width, indices=indices, views=views)
    sides = {name: side.astype(height.dtype) for name, side in zip(("height", "width"), drawn, strict=True)}
    dataset = with_columns(dataset, {**sides, CACHED_VIEW: views})
    columns = BucketColumns(prepared.open_table, prepared.spec)
    return replace(prepared, dataset=map_columns(dataset, columns, overwrite=True))
