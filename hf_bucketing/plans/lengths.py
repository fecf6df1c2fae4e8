"""What a length plan depends on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from ..randomness import Purpose, generator
from .assemble import counted_plan, take_segments
from .balance import split_largest
from .buckets import BucketPlanConfig, plan_lockstep
from .epoch import MIXED, EpochPlan, IntArray, check_processes
from .rows import BoolArray, EpochRows, FloatArray, epoch_rows

LengthStrategy = Literal["bucket", "random", "sorted"]
LengthOversize = Literal["error", "own_batch", "drop"]
Boundaries = Literal["quantile", "uniform"] | Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlanConfig:
    """What a length plan depends on, beside the lengths, the epoch and the number of processes.

    Args:
        strategy (`str`): `"bucket"` makes batches of samples whose lengths lie between the same two boundaries;
            `"random"` of any samples; `"sorted"` of samples of neighbouring length, in random order among equal ones,
            for the least padding and the least mixing.
        batch_size (`int`, *optional*): Samples per process and step.
        capacity (`float`, *optional*): Instead of `batch_size`, in the unit of the lengths: the number of samples ×
            the longest of them is at most this. In a bucket, its upper bound counts as the longest, so all its full
            batches are of one size, and can be padded to one shape.
        num_buckets (`int`): For `"quantile"` and `"uniform"` boundaries.
        boundaries (`str` or sequence of `float`): `"quantile"`: equally many samples in each bucket. `"uniform"`:
            equally wide buckets. Or the upper bounds of the buckets themselves, rising, each included; what is longer
            than the last one makes one more bucket.
        drop_last (`bool`): Leave out what fills no step on all processes, instead of making smaller batches of it.
        shuffle (`bool`): If False, samples stay in their order (`"sorted"`: of rising length), and steps too; for
            evaluation.
        oversize (`str`): A sample longer than the capacity is an `"error"` that names it, gets an `"own_batch"` above
            the capacity, or is a counted `"drop"`.
        seed (`int`): Not negative.

    Raises:
        PlanError: If not exactly one of `batch_size` and `capacity` is given, on an unknown name, a value below 1, or
            boundaries that do not rise.
    """

    strategy: LengthStrategy = "bucket"
    batch_size: int | None = None
    capacity: float | None = None
    num_buckets: int = 10
    boundaries: Boundaries = "quantile"
    drop_last: bool = False
    shuffle: bool = True
    oversize: LengthOversize = "error"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in {"strategy": LengthStrategy, "oversize": LengthOversize}.items():
            if getattr(self, name) not in get_args(choices):
                raise PlanError(f"{name} must be one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}.")
        if (self.batch_size is None) == (self.capacity is None):
            raise PlanError("Give either batch_size or capacity.")
        if (self.batch_size is not None and self.batch_size < 1) or self.num_buckets < 1:
            raise PlanError(
                f"Expected batch_size and num_buckets of at least 1, got {self.batch_size} and {self.num_buckets}."
            )
        if self.capacity is not None and not self.capacity > 0:
            raise PlanError(f"capacity must be above 0, got {self.capacity}.")
        if isinstance(self.boundaries, str):
            if self.boundaries not in ("quantile", "uniform"):
                raise PlanError(f'boundaries must be "quantile", "uniform" or numbers, got {self.boundaries!r}.')
        else:
            bounds = tuple(map(float, self.boundaries))
            if not bounds or not all(low < high for low, high in pairwise(bounds)):
                raise PlanError(f"Boundaries must be numbers that rise, got {self.boundaries!r}.")
            object.__setattr__(self, "boundaries", bounds)

    def upper_bounds(self, lengths: npt.NDArray[Any]) -> FloatArray:
        """Return the upper bound of each bucket, included; the last one is at least the largest of the lengths.

        Args:
            lengths (array of `int` or `float`, shape `(n,)`): At least one; those that are to be bucketed.

        Example:
            >>> LengthPlanConfig(batch_size=1, num_buckets=3, boundaries="uniform").upper_bounds(np.array([1.0, 4, 7]))
            array([3., 5., 7.])
        """
        longest = lengths.max()
        if not isinstance(self.boundaries, str):
            bounds = np.array(self.boundaries, np.float64)
            return bounds if bounds[-1] >= longest else np.append(bounds, longest)
        if self.boundaries == "uniform":
            return np.linspace(lengths.min(), longest, self.num_buckets + 1)[1:]
        # Bounds are lengths that occur, so that the sizes of batches follow from the longest sample of a bucket.
        bounds = np.quantile(lengths, np.linspace(0, 1, self.num_buckets + 1)[1:], method="inverted_cdf")
        return np.unique(bounds).astype(np.float64)


_CHUNK = 2**18


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

    With `strategy="bucket"` this is a bucket plan: lockstep and tail are those of [`plan_buckets`]. Otherwise
    neighbouring batches make a step; if their number does not divide evenly among the processes, those of most
    samples are split, and only if all hold one, fewer than `num_processes` samples are dropped.

    Args:
        lengths (array of `int` or `float`, shape `(n,)`): Length of each row in any unit, 0 or less for rejected ones.
        config ([`LengthPlanConfig`]): Strategy, batch size or capacity, and seed.
        epoch (`int`): Not negative; every epoch has its own order.
        num_processes (`int`): At least 1.
        weights (array of `float`, shape `(n,)`, *optional*): How often each row comes per epoch; by default once.
        consumed (array of `int`, *optional*): Row numbers that were seen in this epoch, as often as they were; the
            plan then holds what the epoch has left, which may be no step at all.

    Returns:
        [`EpochPlan`]: With the bucket of each batch, −1 where there are no buckets, and drop reasons `rejected`,
        `oversize`, `weight` (rows that do not come in this epoch) and `remainder`.

    Raises:
        PlanError: If a row exceeds the capacity (the message names the longest), or too few rows have a length.

    Example:
        Two buckets, up to 3 and up to 8 long: batches of four and of one.

        >>> config = LengthPlanConfig(capacity=12, num_buckets=2, shuffle=False)
        >>> plan = plan_lengths([8, 1, 2, 3, 7, 3], config, epoch=0, num_processes=1)
        >>> [batch.tolist() for batch in plan.batches()]
        [[1, 2, 3, 5], [0], [4]]
    """
    check_processes(num_processes)
    values = np.asarray(lengths)
    over = oversize_rows(values, config)
    dropped = over if config.oversize == "drop" else None
    chosen = epoch_rows(
        values > 0, oversize=dropped, weights=weights, consumed=consumed, seed=config.seed, epoch=epoch
    )
    if len(chosen.rows) < num_processes and not chosen.consumed:
        raise PlanError(
            f"{len(chosen.rows)} of {len(values)} rows have a length, fewer than the {num_processes} processes."
        )
    rng = generator(Purpose.LENGTH_PLAN, config.seed, epoch, chosen.consumed) if config.shuffle else None
    make = _in_buckets if config.strategy == "bucket" else _one_after_the_other
    plan = make(values, config, chosen=chosen, num_processes=num_processes, rng=rng)
    if not plan.num_steps and not chosen.consumed:
        raise PlanError(f"{len(chosen.rows)} rows do not fill one step of {num_processes} processes; drop_last=False?")
    return plan


def oversize_rows(lengths: npt.NDArray[Any], config: LengthPlanConfig) -> BoolArray:
    """Return which rows are longer than the capacity.

    Raises:
        PlanError: If there is one and `config.oversize` is `"error"`; the message names the longest.
    """
    over: BoolArray = lengths > (np.inf if config.capacity is None else config.capacity)
    if config.oversize == "error" and over.any():
        worst = int(lengths.argmax())
        raise PlanError(
            f"Row {worst} is {lengths[worst]} long and exceeds `capacity={config.capacity}` "
            f"({np.count_nonzero(over)} rows do).",
            advice=["raise `capacity`", 'give `oversize="own_batch"` or `oversize="drop"`'],
        )
    return over


def length_buckets(lengths: npt.ArrayLike, config: LengthPlanConfig) -> npt.NDArray[Any]:
    """Return the upper bound of each bucket, included: what its batches can be padded to for static shapes.

    Args:
        lengths (array of `int` or `float`, shape `(n,)`): As for [`plan_lengths`]; whole numbers have whole bounds.
        config ([`LengthPlanConfig`]): Its boundaries. None exceeds the capacity, but for the one of the rows above
            the capacity, if those get batches of their own.

    Returns:
        `int64` or `float64` of shape `(num_buckets,)`, rising. Equal bounds are one bucket, so there may be fewer than
        `config.num_buckets`.

    Raises:
        PlanError: If no row has a length.
    """
    values = np.asarray(lengths)
    capacity = np.inf if config.capacity is None else config.capacity
    over = values[values > capacity] if config.oversize == "own_batch" else values[:0]
    inside = values[(values > 0) & (values <= capacity)]
    if not len(inside) + len(over):
        raise PlanError("No row has a length above 0 that the capacity can hold.")
    bounds = np.minimum(config.upper_bounds(inside), capacity) if len(inside) else np.zeros(0)
    bounds = np.append(bounds, over.max()) if len(over) else bounds
    if np.issubdtype(values.dtype, np.integer):
        bounds = np.floor(bounds).astype(np.int64)
    bounds = np.unique(bounds)
    return bounds[bounds > 0]


def _in_buckets(
    values: npt.NDArray[Any],
    config: LengthPlanConfig,
    *,
    chosen: EpochRows,
    num_processes: int,
    rng: np.random.Generator | None,
) -> EpochPlan:
    """Plan as for buckets of sizes."""
    bounds = length_buckets(values, config)
    ids = np.searchsorted(bounds, values)
    settings = BucketPlanConfig(
        batch_size=config.batch_size or _sizes_for(bounds, config.capacity or 0),
        tail="drop" if config.drop_last else "short",
    )
    return plan_lockstep(ids, settings, chosen=chosen, num_processes=num_processes, rng=rng)


def _sizes_for(bounds: npt.NDArray[Any], capacity: float) -> dict[int, int]:
    """Return how many samples of each bucket fit, at least one."""
    sizes = np.floor(capacity / bounds)
    sizes -= sizes * bounds > capacity  # the division may have been rounded up
    return dict(enumerate(np.maximum(sizes, 1).astype(int).tolist()))


def _one_after_the_other(
    values: npt.NDArray[Any],
    config: LengthPlanConfig,
    *,
    chosen: EpochRows,
    num_processes: int,
    rng: np.random.Generator | None,
) -> EpochPlan:
    """Cut the rows, in random order or sorted, into batches, and make steps of neighbouring ones."""
    rows = chosen.rows if rng is None else rng.permutation(chosen.rows)
    if config.strategy == "sorted":
        rows = rows[np.argsort(values[rows], kind="stable")]
    offsets = _cut(values[rows], config)
    if config.drop_last:
        first, size = _whole_steps(offsets, config, num_processes=num_processes, rng=rng)
    else:
        even = split_largest(offsets, num_processes)
        if even is None:  # fewer samples than batches wanted: all single ones but fewer than num_processes
            spare = len(rows) % num_processes
            rows = rows[: len(rows) - spare] if rng is None else np.delete(rows, rng.permutation(len(rows))[:spare])
            even = np.arange(len(rows) + 1)
        first, size = even[:-1], np.diff(even)
    if rng is not None:
        order = rng.permutation(np.arange(len(size)).reshape(-1, num_processes)).ravel()
        first, size = first[order], size[order]
    return counted_plan(
        take_segments(rows, first, size),
        np.concatenate([[0], np.cumsum(size)]),
        np.full(len(size), MIXED, np.int32),
        num_processes=num_processes,
        chosen=chosen,
    )


def _whole_steps(
    offsets: IntArray, config: LengthPlanConfig, *, num_processes: int, rng: np.random.Generator | None
) -> tuple[IntArray, IntArray]:
    """Return first rows and sizes of the batches without an incomplete last one, a multiple of the processes."""
    size = np.diff(offsets)
    if config.batch_size is not None:
        size = size[size == config.batch_size]
    spare = len(size) % num_processes
    out = np.arange(len(size))[::-1][:spare] if rng is None else rng.permutation(len(size))[:spare]
    return np.delete(offsets[: len(size)], out), np.delete(size, out)


def _cut(lengths: npt.NDArray[Any], config: LengthPlanConfig) -> IntArray:
    """Return the bounds of batches of consecutive samples, each as large as the batch size or the capacity allows."""
    if config.batch_size is not None:
        return np.append(np.arange(0, len(lengths), config.batch_size), len(lengths))
    capacity = config.capacity or 0
    cuts = array("q", [0])
    count, longest = 0, 0.0
    position = 0
    for start in range(0, len(lengths), _CHUNK):
        for length in lengths[start : start + _CHUNK].tolist():
            longest = max(length, longest)
            if count and (count + 1) * longest > capacity:
                cuts.append(position)
                count, longest = 0, length
            count += 1
            position += 1
    if position:
        cuts.append(position)
    return np.array(cuts, np.int64)
