"""Boundaries of length buckets: how many, and where padding and unused room are least."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray, IntArray

MOST_BUCKETS = 50
"""Buckets that a large data set gets by default."""

BATCHES_PER_BUCKET = 4
"""Batches of all processes that a bucket fills by default, so that its samples meet many others over the epochs."""

_CANDIDATES = 256
_MOST_SAMPLES = 2**31
_MOST_FITTED = 128


def default_num_buckets(num_batches: float) -> int:
    """Return the number of buckets for a data set that fills so many batches.

    Example:
        >>> default_num_buckets(3), default_num_buckets(40), default_num_buckets(100_000)
        (1, 10, 50)
    """
    return int(min(max(num_batches // BATCHES_PER_BUCKET, 1), MOST_BUCKETS))


def quantile_bounds(lengths: npt.NDArray[Any], num_buckets: int) -> FloatArray:
    """Return upper bounds of buckets with equally many samples; all of them are lengths that occur."""
    shares = np.linspace(0, 1, num_buckets + 1)[1:]
    return np.unique(np.quantile(lengths, shares, method="inverted_cdf")).astype(np.float64)


def batch_sizes(bounds: FloatArray, *, max_tokens: float, max_samples: int | None) -> IntArray:
    """Return how many samples as long as each bound fit into a batch: at least one, and at most 2³¹.

    Args:
        bounds (`float64`, shape `(buckets,)`): Lengths, above 0.
        max_tokens (`float`): Largest padded batch, in the unit of the lengths.
        max_samples (`int`, *optional*): Most samples per batch.

    Example:
        >>> batch_sizes(np.array([4.0, 5.0, 30.0]), max_tokens=12, max_samples=None)
        array([3, 2, 1])
    """
    sizes = np.floor(max_tokens / bounds)
    sizes -= sizes * bounds > max_tokens  # the division may have been rounded up
    sizes = np.minimum(sizes, _MOST_SAMPLES if max_samples is None else max_samples)
    return np.maximum(sizes, 1).astype(np.int64)


def fitted_bounds(
    lengths: npt.NDArray[Any], num_buckets: int, *, max_tokens: float | None, max_samples: int | None
) -> FloatArray:
    """Return the upper bounds of buckets that waste least when every sample is padded to its bucket's bound.

    A sample of a bucket costs its bound, and with `max_tokens` also its share of a batch's room: a bound just below
    `max_tokens / k` fills batches of k samples, one just above it leaves nearly a k-th of them empty. The bounds are
    optimal among 256 quantiles and the lengths next to `max_tokens / k`, by dynamic programming over buckets; more
    than 128 buckets are quantiles.

    Args:
        lengths (array of `int` or `float`, shape `(n,)`): Lengths of the samples, at least one, all above 0.
        num_buckets (`int`): Most buckets, at least 1.
        max_tokens (`float`, *optional*): Largest padded batch; None for batches of a fixed number of samples.
        max_samples (`int`, *optional*): Most samples per batch, beside `max_tokens`.

    Returns:
        `float64` of shape `(buckets,)`, rising; the last one is the largest length.

    Example:
        Three samples of 4 fill a batch of 12, as do two of 6; two of 5 would leave room.

        >>> fitted_bounds(np.array([3, 4, 4, 4, 5, 6, 6]), 2, max_tokens=12, max_samples=None)
        array([4., 6.])
    """
    if num_buckets > _MOST_FITTED:
        return quantile_bounds(lengths, num_buckets)
    values = np.sort(lengths)
    places = np.ceil(np.linspace(0, 1, _CANDIDATES + 1)[1:] * len(values)).astype(np.int64) - 1
    if max_tokens is not None:
        fitting = max_tokens / np.arange(1, min(_CANDIDATES, max_samples or _CANDIDATES) + 1)
        just_below = np.searchsorted(values, fitting, side="right") - 1
        places = np.concatenate([places, just_below[just_below >= 0]])
    bounds = np.unique(values[places]).astype(np.float64)
    cost = bounds
    if max_tokens is not None:
        cost = bounds + max_tokens / batch_sizes(bounds, max_tokens=max_tokens, max_samples=max_samples)
    rows_up_to = np.append(0, np.searchsorted(values, bounds, side="right"))
    return bounds[_cheapest_cuts(rows_up_to, cost, min(num_buckets, len(bounds)))]


def _cheapest_cuts(rows_up_to: IntArray, cost: FloatArray, num_buckets: int) -> IntArray:
    """Return which of m bounds to take so that all rows together cost least.

    Args:
        rows_up_to (`int64`, shape `(m + 1,)`): Rows up to each bound, after a 0.
        cost (`float64`, shape `(m,)`): Cost of each row of a bucket that ends at the bound.
        num_buckets (`int`): Buckets, from 1 to m.
    """
    number = np.arange(len(cost))
    rows = rows_up_to[1:, None] - rows_up_to[:-1]
    of_bucket = np.where(rows > 0, rows * cost[:, None], np.inf)  # up to bound i, from after bound j − 1
    least, joined = of_bucket[:, 0], of_bucket[:, 1:]
    previous = []
    for _ in range(num_buckets - 1):
        totals = joined + least[:-1]
        best = totals.argmin(axis=1)
        least = totals[number, best]
        previous.append(best)
    cuts = [len(cost) - 1]
    for best in reversed(previous):
        cuts.append(int(best[cuts[-1]]))
    return np.array(cuts[::-1])
