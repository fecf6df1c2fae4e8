"""Kept area: the share of a frame that is inside its bucket after cover-resize and crop."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .arrays import FloatArray, IntArray
from .assignment import has_bucket
from .open_table import OpenTable
from .table import BucketTable

_BLOCK = 1 << 20
"""Rows that are computed together: targets of all rows would take gigabytes of a large data set."""


def kept_area(
    heights: npt.ArrayLike, widths: npt.ArrayLike, *, target_heights: npt.ArrayLike, target_widths: npt.ArrayLike
) -> FloatArray:
    """Return the share of each frame that is inside its target after cover-resize and crop.

    It is that of the aspect ratios, before sides are rounded to pixels. The arguments have one shape, or shapes that
    broadcast, which the shares have.

    Args:
        heights (array of `int`): Heights of the frames in pixels.
        widths (array of `int`): Widths of the frames in pixels.
        target_heights (array of `int`): Heights of the targets in pixels.
        target_widths (array of `int`): Widths of the targets in pixels.

    Example:
        >>> kept_area([100, 64], [200, 64], target_heights=64, target_widths=64).tolist()
        [0.5, 1.0]
    """
    across = np.asarray(widths, np.int64) * np.asarray(target_heights, np.int64)
    down = np.asarray(heights, np.int64) * np.asarray(target_widths, np.int64)
    return np.asarray(np.minimum(across, down) / np.maximum(np.maximum(across, down), 1), np.float64)


def mean_kept_area(
    table: BucketTable | OpenTable, bucket_ids: npt.ArrayLike, *, heights: npt.ArrayLike, widths: npt.ArrayLike
) -> float:
    """Return the mean kept area of the rows that have a bucket, each once; NaN if none has one.

    Args:
        table ([`BucketTable`][hf_bucketing.BucketTable] or [`OpenTable`][hf_bucketing.OpenTable]): The buckets.
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row, negative for a rejected one.
        heights (array of `int`, shape `(n,)`): Heights of the rows in pixels.
        widths (array of `int`, shape `(n,)`): Widths of the rows in pixels.
    """
    columns = [np.asarray(column) for column in (bucket_ids, heights, widths)]
    total, count = 0.0, 0
    for start in range(0, len(columns[0]), _BLOCK):
        block = [column[start : start + _BLOCK] for column in columns]
        ids, *sides = (column[has_bucket(block[0])] for column in block)
        if not len(ids):
            continue
        used, places = np.unique(ids, return_inverse=True)
        targets: IntArray = np.array([table.size(bucket) for bucket in used.tolist()], np.int64)[places]
        total += float(kept_area(*sides, target_heights=targets[:, 1], target_widths=targets[:, 2]).sum())
        count += len(ids)
    return total / count if count else math.nan
