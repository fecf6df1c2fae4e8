"""The length plan: batches of samples that differ in length alone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import BoolArray, FloatArray, IntArray
from ..errors import PlanError, explains_arguments
from ..randomness import Purpose
from ..settings import check_at_least
from .assemble import even_batches, unbucketed_plan, with_steps
from .buckets import BucketPlanConfig, plan_lockstep
from .deal import Remainder
from .epoch import MIXED, EpochPlan
from .rows import EpochRows, RowPlanConfig, check_positive, column_of, epoch_rows

LengthStrategy = Literal["bucket", "random", "sorted"]
LengthRemainder = Literal["short", "drop"]
BoundariesName = Literal["fitted", "quantile", "uniform"]
Boundaries = BoundariesName | Sequence[float]

_CHUNK = 2**18


@explains_arguments(PlanError)
@dataclass(frozen=True, kw_only=True)
class LengthPlanConfig(RowPlanConfig):
    """Settings of a length plan, beside those of [`RowPlanConfig`] and [`EpochConfig`].

    With `shuffle=False`, samples keep their order (`"sorted"`: rising length), and so do steps. Unless `strategy` is
    `"bucket"`, processes may hold different numbers of samples in a step: with `evaluation`, gather with
    `use_gather_object=True`.

    Args:
        strategy (`str`): `"bucket"` makes batches of samples whose lengths lie between the same two boundaries;
            `"random"` of any samples; `"sorted"` of samples of neighbouring length, in random order among equal ones,
            which pads and mixes least.
        batch_size (`int`, *optional*): Samples per process and step.
        max_tokens (`float`, *optional*): Largest padded batch, instead of `batch_size`: the number of samples × the
            longest of them, in the unit of the lengths. In a bucket, its upper bound counts as the longest, so that
            all its full batches have one size and can be padded to one shape.
        max_samples (`int`, *optional*): Most samples per batch, beside `max_tokens`.
        num_buckets (`int`, *optional*): Number of buckets, unless `boundaries` are given; by default as many as leave
            each some 4 batches, at most 50. More buckets pad less; fewer let each sample meet more others.
        boundaries (`str` or sequence of `float`): `"fitted"`: where padding, and with `max_tokens` also the room that
            batches leave, is least over the lengths that occur. `"quantile"`: equally many samples in each bucket.
            `"uniform"`: equally wide buckets. Or the upper bounds of the buckets themselves, rising, each included;
            samples longer than the last one make one more bucket.
        remainder (`"short"` or `"drop"`): What happens to samples that do not fill a step on all processes: `"short"`
            joins those of neighbouring buckets, and only the last step is smaller; `"drop"` drops them.

    Raises:
        PlanError: If not exactly one of `batch_size` and `max_tokens` is given, on an unknown name, a value below 1,
            or boundaries that do not rise.
    """

    strategy: LengthStrategy = "bucket"
    batch_size: int | None = None
    max_tokens: float | None = None
    max_samples: int | None = None
    num_buckets: int | None = None
    boundaries: Boundaries = "fitted"
    remainder: LengthRemainder = "short"

    def __post_init__(self) -> None:
        if self.remainder not in get_args(LengthRemainder) and self.remainder in get_args(Remainder):
            raise PlanError(f'`remainder="{self.remainder}"` is for buckets of sizes; lengths take "short" or "drop".')
        super().__post_init__()
        if (self.batch_size is None) == (self.max_tokens is None):
            raise PlanError("Give either `batch_size` or `max_tokens`.")
        if self.batch_size is not None and self.max_samples is not None:
            raise PlanError("`max_samples` goes with `max_tokens`; `batch_size` is the number of samples already.")
        check_at_least(1, self, "batch_size", "max_samples", "num_buckets", error=PlanError)
        check_positive(self, "max_tokens")
        if isinstance(self.boundaries, str):
            if self.boundaries not in get_args(BoundariesName):
                names = ", ".join(f'"{name}"' for name in get_args(BoundariesName))
                raise PlanError(f"`boundaries` must be {names} or numbers, got {self.boundaries!r}.")
        else:
            try:
                bounds = tuple(map(float, self.boundaries))
            except (TypeError, ValueError):
                bounds = ()
            if not bounds or not np.isfinite(bounds).all() or not all(low < high for low, high in pairwise(bounds)):
                raise PlanError(f"`boundaries` must be finite numbers that rise, got {self.boundaries!r}.")
            object.__setattr__(self, "boundaries", bounds)

    def upper_bounds(self, lengths: npt.NDArray[Any]) -> FloatArray:
        """Return the upper bound of each bucket, included; the last one is at least the largest of the lengths.

        Args:
            lengths (array of `int` or `float`, shape `(n,)`): Lengths of the samples in the buckets, at least one.

        Example:
            >>> LengthPlanConfig(batch_size=1, num_buckets=3, boundaries="uniform").upper_bounds(np.array([1.0, 4, 7]))
            array([3., 5., 7.])
        """
        longest = lengths.max()
        if not isinstance(self.boundaries, str):
            bounds = np.array(self.boundaries, np.float64)
            return bounds if bounds[-1] >= longest else np.append(bounds, longest)
        num_buckets = self.num_buckets
        if num_buckets is None:
            batches = len(lengths) / self.batch_size if self.batch_size else lengths.sum() / _limit(self)
            num_buckets = default_num_buckets(float(batches))
        if self.boundaries == "uniform":
            return np.linspace(lengths.min(), longest, num_buckets + 1)[1:]
        if self.boundaries == "quantile":
            return quantile_bounds(lengths, num_buckets)
        return fitted_bounds(lengths, num_buckets, max_tokens=self.max_tokens, max_samples=self.max_samples)


def plan_lengths(
    lengths: npt.ArrayLike,
    config: LengthPlanConfig,
    *,
    epoch: int,
    num_processes: int,
    weights: npt.ArrayLike | None = None,
    consumed: npt.ArrayLike | None = None,
) -> EpochPlan:
    """Plan an epoch of batches of samples that differ in length alone, the same number on every process.

    With `strategy="bucket"` this is a bucket plan, with the lockstep of [`plan_buckets`]; what remains of a bucket
    joins what remains of the next shorter ones in full steps, of which only the last is smaller. Otherwise
    neighbouring batches make a step. If their number does not divide evenly among the processes, those with the most
    samples are split; only if all hold one sample, fewer than `num_processes` samples are dropped.

    Args:
        lengths (array of `int` or `float`, shape `(n,)`): Length of each row in any unit, 0 or less for rejected ones.
        config ([`LengthPlanConfig`]): Strategy, size of batches, and seed.
        epoch (`int`): Number of the epoch, at least 0; every epoch has its own order.
        num_processes (`int`): Processes that share the batches, at least 1.
        weights (array of `float`, shape `(n,)`, *optional*): Occurrences of each row per epoch; by default 1.
        consumed (array of `int`, *optional*): As in [`plan_buckets`][hf_bucketing.plans.plan_buckets].

    Returns:
        [`EpochPlan`]: With the bucket of each batch, `MIXED` where there are no buckets, and the drop reasons
        `rejected`, `oversize`, `weight` (rows that do not occur in this epoch) and `remainder`.

    Raises:
        PlanError: If a row exceeds `max_tokens` (the message names the longest), or too few rows have a length.

    Example:
        Two buckets, up to 3 and up to 8 long: batches of four and of one.

        >>> config = LengthPlanConfig(max_tokens=12, num_buckets=2, shuffle=False)
        >>> plan = plan_lengths([8, 1, 2, 3, 7, 3], config, epoch=0, num_processes=1)
        >>> [batch.tolist() for batch in plan.batches()]
        [[1, 2, 3, 5], [0], [4]]
    """
    values = column_of(lengths, "lengths")
    over = oversize_rows(values, config)
    chosen = epoch_rows(
        values > 0,
        config,
        Purpose.LENGTH_PLAN,
        epoch=epoch,
        num_processes=num_processes,
        oversize=over if config.oversize == "drop" else None,
        weights=weights,
        consumed=consumed,
    )
    chosen.check_enough(of=len(values), have="a length")
    plan = (_in_buckets if config.strategy == "bucket" else _one_after_the_other)(values, config, chosen)
    return with_steps(plan, config.remainder, chosen)


def oversize_rows(lengths: npt.NDArray[Any], config: LengthPlanConfig) -> BoolArray:
    """Return which rows are longer than `config.max_tokens`.

    Raises:
        PlanError: If there is one and `config.oversize` is `"error"`; the message names the longest.
    """
    over: BoolArray = lengths > _limit(config)
    if config.oversize == "error" and over.any():
        worst = int(lengths.argmax())
        raise PlanError(
            f"Row {worst} is {lengths[worst]} long and exceeds `max_tokens={config.max_tokens}` "
            f"({np.count_nonzero(over)} of {len(over)} rows do).",
            advice=["raise `max_tokens`", 'give `oversize="own_batch"` or `oversize="drop"`'],
        )
    return over


def length_buckets(lengths: npt.ArrayLike, config: LengthPlanConfig) -> npt.NDArray[Any]:
    """Return the upper bound of each bucket, included: the length to pad its batches to for static shapes.

    Args:
        lengths (array of `int` or `float`, shape `(n,)`): As for [`plan_lengths`]; whole numbers have whole bounds.
        config ([`LengthPlanConfig`]): Settings with the boundaries. No bound exceeds `max_tokens`, except that of the
            oversize rows if those get batches of their own.

    Returns:
        `int64` or `float64` of shape `(num_buckets,)`, rising. Equal bounds are one bucket, so there may be fewer than
        `config.num_buckets`.

    Raises:
        PlanError: If no row has a length.
    """
    values = column_of(lengths, "lengths")
    limit = _limit(config)
    over = values[values > limit] if config.oversize == "own_batch" else values[:0]
    inside = values[(values > 0) & (values <= limit)]
    if not len(inside) + len(over):
        raise PlanError("No row has a length above 0 and within `max_tokens`.")
    bounds = np.minimum(config.upper_bounds(inside), limit) if len(inside) else np.zeros(0)
    bounds = np.append(bounds, over.max()) if len(over) else bounds
    if np.issubdtype(values.dtype, np.integer):
        bounds = np.floor(bounds).astype(np.int64)
    bounds = np.unique(bounds)
    return bounds[bounds > 0]


def _limit(config: LengthPlanConfig) -> float:
    return np.inf if config.max_tokens is None else config.max_tokens


def _in_buckets(values: npt.NDArray[Any], config: LengthPlanConfig, chosen: EpochRows) -> EpochPlan:
    """Plan as for buckets of sizes."""
    bounds = length_buckets(values, config)
    size: int | dict[int, int] | None = config.batch_size
    if size is None:
        sizes = batch_sizes(bounds, max_tokens=_limit(config), max_samples=config.max_samples)
        size = dict(enumerate(sizes.tolist()))
    settings = BucketPlanConfig(batch_size=size, remainder=config.remainder)
    buckets: npt.NDArray[Any] = np.searchsorted(bounds, values).astype(np.int32)
    return plan_lockstep(buckets, settings, chosen, join=True)


def _one_after_the_other(values: npt.NDArray[Any], config: LengthPlanConfig, chosen: EpochRows) -> EpochPlan:
    """Cut the rows, in random order or sorted, into batches, and make steps of neighbouring batches."""
    rows, turns = chosen.in_order(apart=config.batch_size)
    if config.strategy == "sorted":
        rows = rows[np.lexsort((values[rows], turns))]
    offsets = _cut(values[rows], config)
    if config.remainder == "drop":
        size = np.diff(offsets)
        size = size if config.batch_size is None else size[size == config.batch_size]
        out = chosen.spare(len(size))
        first, size = np.delete(offsets[: len(size)], out), np.delete(size, out)
    else:
        rows, offsets = even_batches(rows, offsets, chosen)
        first, size = offsets[:-1], np.diff(offsets)
    order = chosen.shuffled(np.arange(len(size)).reshape(-1, chosen.num_processes)).ravel()
    return unbucketed_plan(rows, first[order], size[order], label=MIXED, chosen=chosen)


def _cut(lengths: npt.NDArray[Any], config: LengthPlanConfig) -> IntArray:
    """Return the bounds of batches of consecutive samples, each as large as the limits allow."""
    if config.batch_size is not None:
        return np.append(np.arange(0, len(lengths), config.batch_size), len(lengths))
    limit = _limit(config)
    most = np.inf if config.max_samples is None else config.max_samples
    cuts = array("q", [0])
    count, longest = 0, 0.0
    position = 0
    for start in range(0, len(lengths), _CHUNK):
        for length in lengths[start : start + _CHUNK].tolist():
            longest = max(length, longest)
            if count and ((count + 1) * longest > limit or count == most):
                cuts.append(position)
                count, longest = 0, length
            count += 1
            position += 1
    if position:
        cuts.append(position)
    return np.array(cuts, np.int64)


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
