"""The cached views that an epoch holds of each row: another one in each epoch, or all as rows of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from datasets import Features, Value, concatenate_datasets

from ..buckets.arrays import IntArray
from ..columns.apply import with_columns
from ..columns.arrays import column_array
from ..columns.prepared import PreparedDataset
from ..loaders.random_resize import RandomResize, numbers_of_rows
from ..randomness import COLUMN_PREFIX, ROW, Purpose, generator

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
