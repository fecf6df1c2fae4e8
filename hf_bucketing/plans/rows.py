"""Choose the rows of an epoch, and how often each occurs: rejections, weights, and rows seen before a restart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import BoolArray, FloatArray, IntArray, whole_column
from ..errors import PlanError
from ..randomness import Purpose, generator
from ..settings import check_at_least, check_types

MOST_OCCURRENCES = 100
"""Largest mean number of occurrences of a row in an epoch; data sets of fewer than a million rows may have more."""

Oversize = Literal["error", "own_batch", "drop"]
"""What happens to a sample that exceeds a limit by itself: an error, a batch above the limit, or a counted drop."""


@dataclass(frozen=True, kw_only=True)  # no slots: others read the defaults from the class
class EpochConfig:
    """Settings of every plan.

    Args:
        shuffle (`bool`): Whether rows and steps come in another random order in every epoch; if not, they keep their
            own, as far as the plan does.
        seed (`int`): Seed of all draws, at least 0.
        evaluation (`bool`): Whether every row comes exactly once over all processes, also where they do not divide
            evenly: the last step then has one row per process, and its last processes repeat rows, which
            `accelerator.gather_for_metrics` leaves out. Give `shuffle=False` for one order in every epoch.

    Raises:
        PlanError: On a value of another type, a negative seed, or an evaluation that would leave rows out.
    """

    shuffle: bool = True
    seed: int = 0
    evaluation: bool = False

    def __post_init__(self) -> None:
        check_types(self, error=PlanError)
        check_at_least(0, self, "seed", error=PlanError)
        check_evaluation(self)

    def named_in_states(self) -> dict[str, object]:
        """Return the settings that a saved state compares, by name; the seed stands beside them."""
        return {name: value for name, value in vars(self).items() if name != "seed"}


@dataclass(frozen=True, kw_only=True)
class RowPlanConfig(EpochConfig):
    """Settings of a plan whose limit a single row can exceed: of lengths, and of packs.

    Args:
        oversize (`"error"`, `"own_batch"` or `"drop"`): What happens to a row that exceeds a limit by itself: an error
            that names it, a batch of its own above the limit, or a counted drop.
    """

    oversize: Oversize = "error"


class EpochRows(NamedTuple):
    """The rows that are left of an epoch, and what all plans of them share.

    Attributes:
        rows (`int64`, shape `(n,)`): Row numbers in rising order; a repeated row occurs several times.
        drop_reasons (mapping of `str` to `int`): Number of rows that the epoch does not hold, by reason: `rejected`,
            `oversize`, `weight`.
        consumed (`int`): Number of occurrences seen before.
        seen (`int64`, shape `(k,)`): Different rows among the consumed ones.
        repeats (`bool`): Whether a row may occur more than once.
        num_processes (`int`): Processes that share the plan, at least 1.
        rng (`numpy.random.Generator`, *optional*): Source of the order; None keeps the order of the rows.
        evaluation (`bool`): Whether rows that do not divide evenly make one more step, which repeats some of them.
    """

    rows: IntArray
    drop_reasons: dict[str, int]
    consumed: int
    seen: IntArray
    repeats: bool
    num_processes: int
    rng: np.random.Generator | None
    evaluation: bool = False

    def shuffled(self, values: IntArray) -> IntArray:
        """Return values in random order, or in their own without a generator."""
        return values if self.rng is None else self.rng.permutation(values)

    def in_order(self, *, apart: int | None = None) -> tuple[IntArray, IntArray]:
        """Return all rows in random order, or in their own, and the turn of each; see [`spread_repeats`]."""
        if not self.repeats:
            return self.shuffled(self.rows), np.zeros(len(self.rows), np.int64)
        return spread_repeats(self.rows, np.array([len(self.rows)]), apart=apart, rng=self.rng)

    def spare(self, count: int) -> IntArray:
        """Return which of `count` items to drop so that they divide evenly: random ones, or the last ones."""
        order = np.arange(count)[::-1] if self.rng is None else self.rng.permutation(count)
        return order[: count % self.num_processes]

    def check_enough(self, *, of: int, have: str) -> None:
        """Raise PlanError if a training epoch has fewer rows than processes, of a number of rows in all."""
        if len(self.rows) < (1 if self.evaluation else self.num_processes) and not self.consumed:
            different, unweighted = len(np.unique(self.rows)), self.drop_reasons.get("weight", 0)
            occur = f", which occur {len(self.rows)} times in this epoch" if self.repeats else ""
            idle = f" ({unweighted} more do not occur in this epoch, by `weights`)" if unweighted else ""
            raise PlanError(
                f"{different} of {of} rows have {have}{occur}, fewer than the {self.num_processes} processes{idle}. "
                "Look at the counts of the data set's rejection column."
            )

    def __str__(self) -> str:
        """Return how many rows there are, and how often they occur if that is more."""
        different = len(np.unique(self.rows))
        return (
            f"{len(self.rows)} occurrences of {different} usable rows" if self.repeats else f"{different} usable rows"
        )


def epoch_rows(
    usable: BoolArray,
    config: EpochConfig,
    purpose: Purpose,
    *,
    epoch: int,
    num_processes: int,
    oversize: BoolArray | None = None,
    weights: npt.ArrayLike | None = None,
    consumed: npt.ArrayLike | None = None,
) -> EpochRows:
    """Choose the rows of an epoch: all occurrences but the `consumed` ones; arguments as in the plans.

    `usable` and `oversize`, both of shape `(n,)`, are False for rejected rows, and True for rows to drop because no
    batch can hold them.

    Raises:
        PlanError: If there is no process, there are not as many weights as rows, a weight is negative or not finite,
            the weights ask for more occurrences than fit in memory, or a consumed row does not exist.
    """
    if num_processes < 1:
        raise PlanError(f"`num_processes` must be at least 1, got {num_processes}.")
    reasons = {"rejected": len(usable) - int(np.count_nonzero(usable))}
    if oversize is not None:
        reasons["oversize"] = int(np.count_nonzero(usable & oversize))
        usable = usable & ~oversize
    different = np.zeros(0, np.int64)
    if weights is None and (consumed is None or not np.size(consumed)):
        rows, taken, repeats = np.flatnonzero(usable), 0, False
    else:
        counts = usable.astype(np.int64)
        if weights is not None:
            wanted = occurrences(_checked(weights, usable), seed=config.seed, epoch=epoch)
            counts = np.where(usable, wanted, 0)
            reasons["weight"] = int(np.count_nonzero(usable & (counts == 0)))
        total = int(counts.sum())
        if consumed is not None and np.size(consumed):
            seen = np.asarray(consumed, np.int64)
            if seen.min() < 0 or seen.max() >= len(usable):
                raise PlanError(
                    f"Consumed rows must be from 0 to {len(usable) - 1}, got {seen.min()} to {seen.max()}."
                )
            times = np.bincount(seen, minlength=len(usable))
            different = np.flatnonzero(times)
            counts = np.maximum(counts - times, 0)
        repeats = bool(len(counts)) and int(counts.max()) > 1
        rows = np.repeat(np.arange(len(usable)), counts)
        taken = total - len(rows)
    rng = generator(purpose, config.seed, epoch, taken) if config.shuffle else None
    return EpochRows(rows, reasons, taken, different, repeats, num_processes, rng, config.evaluation)


def occurrences(weights: FloatArray, *, seed: int, epoch: int) -> IntArray:
    """Return how often each row occurs in an epoch, so that every weight is met exactly over the epochs.

    A row of weight 2.3 occurs two or three times. Each row has a phase, and occurs in epoch `e` as often as there are
    whole numbers between `phase + e·weight` and `phase + (e + 1)·weight`: in any run of E epochs ⌊E·weight⌋ or
    ⌈E·weight⌉ times, on average over seeds exactly `E·weight` times. The phases of rows with the same fraction are
    evenly spaced, so that the length of an epoch varies by at most one row per different fraction.

    Args:
        weights (`float64`, shape `(n,)`): At least 0.
        seed (`int`): Not negative.
        epoch (`int`): Not negative.

    Returns:
        `int64` of shape `(n,)`.

    Example:
        >>> weights = np.array([0.25] * 4 + [2.0])
        >>> [occurrences(weights, seed=0, epoch=epoch).sum().item() for epoch in range(4)]
        [3, 3, 3, 3]
        >>> sum(occurrences(weights, seed=0, epoch=epoch) for epoch in range(4))
        array([1, 1, 1, 1, 8])
    """
    whole = np.floor(weights)
    counts = whole.astype(np.int64)
    fraction = weights - whole
    rows = np.flatnonzero(fraction)
    rng = generator(Purpose.WEIGHTS, seed)
    rng.shuffle(rows)
    rows = rows[np.argsort(fraction[rows], kind="stable")]
    part = fraction[rows]
    starts_group = np.append(True, part[1:] != part[:-1])[: len(part)]
    first = np.flatnonzero(starts_group)
    size = np.diff(np.append(first, len(part)))
    shift = np.repeat(rng.random(len(first)) - first, size)
    phase = (np.arange(len(rows)) + shift) / np.repeat(size, size)
    counts[rows] += (np.floor(phase + (epoch + 1) * part) - np.floor(phase + epoch * part)).astype(np.int64)
    return counts


def epoch_occurrences(weights: npt.ArrayLike | None, *, num_rows: int, seed: int, epoch: int = 0) -> IntArray:
    """Return how often each row of a data set occurs in an epoch, for those that count what plans hold.

    Args:
        weights (array of `float`, shape `(n,)`, *optional*): Occurrences of each row per epoch; by default 1.
        num_rows (`int`): Rows of the data set.
        seed (`int`): Seed of the plans.
        epoch (`int`): Not negative.

    Returns:
        `int64` of shape `(n,)`.

    Raises:
        PlanError: As the plans, on weights that they do not take.
    """
    if weights is None:
        return np.ones(num_rows, np.int64)
    return occurrences(_checked(weights, np.ones(num_rows, np.bool_)), seed=seed, epoch=epoch)


def earlier_occurrences(rows: IntArray, *, before: IntArray) -> IntArray | None:
    """Return how often each of some rows occurred before, or None if no row occurs twice.

    Args:
        rows (`int64`, shape `(n,)`): Rows in the order in which they occur.
        before (`int64`, shape `(k,)`): Rows that occurred before all of them.

    Returns:
        `int64` of shape `(n,)`.

    Example:
        >>> earlier_occurrences(np.array([4, 1, 4, 4]), before=np.array([1]))
        array([0, 1, 1, 2])
    """
    counts = np.bincount(np.concatenate([before, rows]))
    if counts.max(initial=0) < 2:
        return None
    order = np.argsort(rows, kind="stable")
    ends = np.cumsum(np.bincount(rows, minlength=len(counts)))
    starts = np.append(0, ends)[:-1]
    earlier = np.empty(len(rows), np.int64)
    earlier[order] = np.arange(len(rows)) - starts[rows[order]]
    return earlier + np.bincount(before, minlength=len(counts))[rows]


def spread_repeats(
    rows: IntArray, counts: IntArray, *, apart: IntArray | int | None, rng: np.random.Generator | None
) -> tuple[IntArray, IntArray]:
    """Order the rows of each group so that the occurrences of one row lie far apart.

    A group takes as many turns as its most frequent row has occurrences. The occurrences of a row go to different
    turns, spread over all, and the turns are equally long within one row. In each turn, the rows of a part of it come
    in random order, so that two occurrences lie at least `apart` places apart wherever turns are longer than that.

    Args:
        rows (`int64`, shape `(n,)`): Rows of all groups, one group after the other.
        counts (`int64`, shape `(k,)`): Occurrences in each group, at least 1.
        apart (`int` or array of `int`, shape `(k,)`, *optional*): Fewest places between two occurrences of a row; by
            default half of a turn.
        rng (`numpy.random.Generator`, *optional*): Source of the order; without it, each turn keeps the order of
            rows.

    Returns:
        Rows and the turn of each, both `int64` of shape `(n,)`.

    Example:
        >>> spread_repeats(np.array([0, 0, 0, 1, 2, 2]), np.array([6]), apart=None, rng=None)
        (array([0, 1, 0, 2, 0, 2]), array([0, 0, 1, 1, 2, 2]))
    """
    group = np.repeat(np.arange(len(counts)), counts)
    end = int(rows.max(initial=0)) + 1
    rank = rows if rng is None else rng.permutation(end)[rows]
    order = np.argsort(group * end + rank, kind="stable")
    rank = rank[order]
    starts = np.cumsum(counts) - counts
    starts_row = np.append(True, rank[1:] != rank[:-1])[: len(rows)]
    starts_row[starts] = True
    number = np.cumsum(starts_row) - 1
    turns = np.maximum.reduceat(np.bincount(number)[number], starts) if len(rows) else counts
    length = counts // np.maximum(turns, 1)
    part = np.maximum((length - (length // 2 if apart is None else apart)) // 2, 1)[group]
    place = np.arange(len(rows)) - starts[group]
    stride = np.array([_stride(int(number)) for number in turns], np.int64)
    turn = place * stride[group] % turns[group]
    last = np.arange(len(rows)) if rng is None else rng.permutation(len(rows))
    key = 2 * (len(rows) + 1) * group + (length[group] + 1) * turn + place // turns[group] // part
    last = last[np.argsort(key[last], kind="stable")]
    return rows[order][last], turn[last]


def _stride(turns: int) -> int:
    """Return the step from one occurrence of a row to its next turn: near the golden section, and it visits all."""
    return next(step for step in range(max(1, round(0.618 * turns)), 2 * turns + 1) if math.gcd(step, turns) == 1)


def _checked(weights: npt.ArrayLike, usable: BoolArray) -> FloatArray:
    values = column_of(weights, "weights").astype(np.float64, copy=False)
    if values.shape != usable.shape:
        raise PlanError(f"`weights` needs one value per row: expected shape {usable.shape}, got {values.shape}.")
    if len(values) and values.min() < 0:
        raise PlanError("`weights` are occurrences of each row per epoch; they must be at least 0.")
    total, most = float(np.where(usable, values, 0).sum()), MOST_OCCURRENCES * max(len(values), 2**20)
    if total > most:
        raise PlanError(
            f"The weights ask for {total:.3g} occurrences in an epoch, and at most {most:,} can be planned; lower "
            "`weights`, and train more epochs."
        )
    return values


def check_evaluation(config: Any) -> None:
    """Raise PlanError if a plan for evaluation would leave rows out or repeat them."""
    for name in ("remainder", "oversize"):
        if config.evaluation and getattr(config, name, None) in ("drop", "repeat"):
            raise PlanError(f'`evaluation=True` takes every row once; leave `{name}="{getattr(config, name)}"` out.')
    if config.evaluation and not getattr(config, "lockstep", True):
        raise PlanError("`lockstep=False` drops rows, of which `evaluation=True` takes every one; leave one out.")


def column_of(values: Any, name: str, *, whole: bool = False) -> npt.NDArray[Any]:
    """Return a column as an array of shape `(n,)`: `int64` if its numbers are or must be whole, else `float64`.

    Narrower types would overflow where lengths are added up.

    Raises:
        PlanError: If the values are no finite numbers, or not whole if they must be; the message names the first row.
    """
    try:
        array = whole_column(values)
    except ValueError as error:  # lists of different lengths
        raise PlanError(f"`{name}` needs one number per row, got lists of numbers.") from error
    if array.ndim == 1 and array.dtype.kind in "iu":
        if array.dtype == np.uint64 and array.max(initial=0) >= 2**63:
            raise PlanError(f"Row {array.argmax()} of `{name}` is {array.max()}; expected a number below 2**63.")
        return array.astype(np.int64, copy=False)
    wanted = f"expected a {'whole' if whole else 'finite'} number"
    if array.ndim == 1 and array.dtype.kind == "O":
        rows = [row for row, value in enumerate(array.tolist()) if not isinstance(value, int | float)]
        if rows:
            raise PlanError(f"Row {rows[0]} of `{name}` is {array[rows[0]]!r}; {wanted}.")
        array = array.astype(np.float64)
    if array.ndim != 1 or array.dtype.kind != "f":
        raise PlanError(f"`{name}` needs one number per row, got {array.dtype} of shape {array.shape}.")
    wrong = np.flatnonzero(~np.isfinite(array) | (whole and array != np.rint(array)))
    if len(wrong):
        raise PlanError(f"Row {wrong[0]} of `{name}` is {array[wrong[0]]}; {wanted}.")
    return array.astype(np.int64 if whole else np.float64, copy=False)


def check_positive(config: object, *names: str) -> None:
    """Raise PlanError if one of the named settings is not above 0; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise PlanError(f"`{name}` must be above 0, got {value}.")
