"""Choose the rows of an epoch, and how often each occurs: rejections, weights, and rows seen before a restart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import BoolArray, FloatArray, IntArray, column_values
from ..errors import PlanError
from ..randomness import Purpose, generator
from ..settings import check_at_least, check_types

MOST_OCCURRENCES = 100
"""Largest mean number of occurrences of a row in an epoch; data sets of fewer than a million rows may have more."""

_CHUNK = 2**16
"""Rows that are counted at once, so that what is between stays in the processor's cache."""

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
        rows, times = RepeatedRows.of(self.rows, rng=self.rng)
        spread = spread_repeats(rows, times[rows], np.array([0]), apart=apart, rng=self.rng)
        return spread.rows, spread.turn_of_rows

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
        if weights is None:
            counts = usable.astype(np.int64)
        else:
            counts = occurrences(_checked(weights, usable), seed=config.seed, epoch=epoch)
            counts[~usable] = 0
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
        rows = np.repeat(np.arange(len(usable), dtype=_smallest(len(usable))), counts)
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
    counts = weights.astype(np.int64)  # rounded down, as weights are at least 0
    of_rows = weights - counts
    rows = np.flatnonzero(of_rows != 0).astype(_smallest(len(weights)))
    rng = generator(Purpose.WEIGHTS, seed)
    rng.shuffle(rows)
    fraction = of_rows[rows]
    del of_rows
    order = stable_order(fraction.view(np.uint64))  # bits of numbers of at least 0 rise with the numbers
    rows, fraction = rows[order], fraction[order]
    del order
    first = np.flatnonzero(np.append(True, fraction[1:] != fraction[:-1])[: len(fraction)])
    size = np.diff(np.append(first, len(fraction)))
    shift = rng.random(len(first)) - first
    more = np.zeros(len(counts), np.int8)
    for start in range(0, len(rows), _CHUNK):
        place = np.arange(start, min(start + _CHUNK, len(rows)))
        group = np.searchsorted(first, place, side="right") - 1
        part = fraction[start : start + _CHUNK]
        phase = (place + shift[group]) / size[group]
        more[rows[start : start + _CHUNK]] = np.floor(phase + (epoch + 1) * part) - np.floor(phase + epoch * part)
    counts += more
    return counts


def stable_order(keys: npt.NDArray[np.unsignedinteger[Any]]) -> IntArray:
    """Return the order that sorts keys, equal ones in their order, as `np.argsort(keys, kind="stable")`.

    Keys are sorted by 16 bits at a time, for which numpy takes linear time; bits that all keys share are skipped.
    """
    order: IntArray | None = None
    for shift in range(0, 8 * keys.itemsize, 16):
        digits = (keys >> keys.dtype.type(shift)).astype(np.uint16)  # its lowest 16 bits
        if len(digits) and digits.min() != digits.max():
            if order is None:
                order = np.argsort(digits, kind="stable")
            else:
                order = order[np.argsort(digits[order], kind="stable")]
    return np.arange(len(keys)) if order is None else order


def _smallest(largest: int) -> type[np.int32 | np.int64]:
    """Return the type of row numbers below a number: the narrower one halves the memory, and draws are the same."""
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


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


class RepeatedRows(NamedTuple):
    """Different rows with their occurrences, in the order in which they are spread.

    Attributes:
        rows (`int`, shape `(m,)`): Different rows, in random order or in their own.
        times (`int`, shape `(end,)`): Occurrences of the rows 0 … `end` − 1, in the narrowest type.
    """

    rows: IntArray
    times: IntArray

    @classmethod
    def of(cls, rows: IntArray, *, rng: np.random.Generator | None) -> RepeatedRows:
        """Return rows, of which some occur several times, in random order; in their own without a generator."""
        counts = np.bincount(rows)
        end, times = len(counts), counts.astype(np.min_scalar_type(counts.max(initial=0)))
        del counts
        if rng is None:
            return cls(np.flatnonzero(times), times)
        numbers: npt.NDArray[Any] = np.arange(end, dtype=_smallest(end))
        ranked = np.empty_like(numbers)
        ranked[rng.permutation(numbers)] = numbers
        return cls(ranked[times[ranked] > 0], times)


class SpreadRows(NamedTuple):
    """Rows with their repeats spread out; see [`spread_repeats`].

    Attributes:
        rows (`int`, shape `(n,)`): Rows of all groups, one group after the other.
        turns (`int64`, shape `(p,)`): Turn of each part of the rows.
        lengths (`int64`, shape `(p,)`): Rows of each part.
    """

    rows: IntArray
    turns: IntArray
    lengths: IntArray

    @property
    def turn_of_rows(self) -> IntArray:
        """Turn of each row, `(n,)`."""
        return np.repeat(self.turns, self.lengths)


def spread_repeats(
    rows: IntArray,
    times: IntArray,
    starts: IntArray,
    *,
    apart: IntArray | int | None,
    rng: np.random.Generator | None,
) -> SpreadRows:
    """Order the rows of each group so that the occurrences of one row lie far apart.

    A group takes as many turns as its most frequent row has occurrences. The occurrences of a row go to different
    turns, spread over all, and the turns are equally long within one row. In each turn, the rows of a part of it come
    in random order, so that two occurrences lie at least `apart` places apart wherever turns are longer than that.

    Args:
        rows (`int`, shape `(m,)`): Different rows of all groups, one group after the other, in the order of
            [`RepeatedRows`].
        times (`int`, shape `(m,)`): Occurrences of each, at least 1.
        starts (`int64`, shape `(k,)`): Place of the first row of each group, which has at least one.
        apart (`int` or array of `int`, shape `(k,)`, *optional*): Fewest places between two occurrences of a row; by
            default half of a turn.
        rng (`numpy.random.Generator`, *optional*): Source of the order; without it, each turn keeps the order of
            rows.

    Example:
        >>> spread = spread_repeats(np.array([0, 1, 2]), np.array([3, 1, 2]), np.array([0]), apart=None, rng=None)
        >>> spread.rows, spread.turn_of_rows
        (array([0, 1, 0, 2, 0, 2]), array([0, 0, 1, 1, 2, 2]))
    """
    if not len(rows):
        return SpreadRows(rows, np.zeros(0, np.int64), np.zeros(0, np.int64))
    turns = np.maximum.reduceat(times, starts).astype(np.int64)
    counts = np.add.reduceat(times, starts, dtype=np.int64)
    total = int(counts.sum())
    length = counts // turns
    part = np.maximum((length - (length // 2 if apart is None else apart)) // 2, 1)
    num_parts = (counts - 1) // turns // part + 1  # of each turn
    # Every part of a turn of a group has a number, in the order in which they come.
    of_group = turns * num_parts
    group = np.repeat(np.arange(len(turns)), turns)
    place = np.arange(len(group)) - np.repeat(np.cumsum(turns) - turns, turns)
    stride = np.array([_stride(int(number)) for number in turns], np.int64)
    turn = place * stride[group] % turns[group]
    first_part = (np.cumsum(of_group) - of_group)[group] + turn * num_parts[group]
    numbers = _part_numbers(counts, turns, part, first_part, num_parts=int(of_group.sum()))
    last: npt.NDArray[Any] = np.arange(total, dtype=_smallest(total))
    if rng is not None:
        rng.shuffle(last)
        last = last[stable_order(numbers[last])]
    else:
        last = last[stable_order(numbers)]
    lengths = np.bincount(numbers, minlength=int(of_group.sum()))
    del numbers
    in_group = np.arange(len(lengths)) - np.repeat(np.cumsum(of_group) - of_group, of_group)
    turn_of_part = in_group // np.repeat(num_parts, of_group)
    return SpreadRows(np.repeat(rows, times)[last], turn_of_part, lengths)


def _part_numbers(
    counts: IntArray, turns: IntArray, part: IntArray, first_part: IntArray, *, num_parts: int
) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return the number of the part that each occurrence goes to, `(n,)`, a piece at a time to save memory.

    Occurrences of a group take turns one after another: the first places of all turns, then the second ones.
    `first_part` has the number of the first part of the turn that comes first, second, … in each group.
    """
    kind = np.uint16 if num_parts <= 2**16 else np.uint32 if num_parts <= 2**32 else np.uint64
    numbers = np.empty(int(counts.sum()), kind)
    starts, first_turn = np.cumsum(counts) - counts, np.cumsum(turns) - turns
    for start in range(0, len(numbers), _CHUNK):
        place = np.arange(start, min(start + _CHUNK, len(numbers)))
        group = np.searchsorted(starts, place, side="right") - 1
        place -= starts[group]
        rounds = place // turns[group]
        place -= rounds * turns[group]
        numbers[start : start + len(place)] = first_part[first_turn[group] + place] + rounds // part[group]
    return numbers


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


def column_of(values: Any, name: str, *, integer: bool = False) -> npt.NDArray[Any]:
    """Return a column as an array of shape `(n,)`: `int64` if its numbers are or must be whole, else `float64`.

    Narrower types would overflow where lengths are added up.

    Raises:
        PlanError: If the values are no finite numbers, or not whole if they must be; the message names the first row.
    """
    try:
        array = column_values(values)
    except ValueError as error:  # lists of different lengths
        raise PlanError(f"`{name}` needs one number per row, got lists of numbers.") from error
    if array.ndim == 1 and array.dtype.kind in "iu":
        if array.dtype == np.uint64 and array.max(initial=0) >= 2**63:
            raise PlanError(f"Row {array.argmax()} of `{name}` is {array.max()}; expected a number below 2**63.")
        return array.astype(np.int64, copy=False)
    wanted = f"expected a {'whole' if integer else 'finite'} number"
    if array.ndim == 1 and array.dtype.kind == "O":
        rows = [row for row, value in enumerate(array.tolist()) if not isinstance(value, int | float)]
        if rows:
            raise PlanError(f"Row {rows[0]} of `{name}` is {array[rows[0]]!r}; {wanted}.")
        array = array.astype(np.float64)
    if array.ndim != 1 or array.dtype.kind != "f":
        raise PlanError(f"`{name}` needs one number per row, got {array.dtype} of shape {array.shape}.")
    wrong = np.flatnonzero(~np.isfinite(array) | (integer and array != np.rint(array)))
    if len(wrong):
        raise PlanError(f"Row {wrong[0]} of `{name}` is {array[wrong[0]]}; {wanted}.")
    return array.astype(np.int64 if integer else np.float64, copy=False)


def check_positive(config: object, *names: str) -> None:
    """Raise PlanError if one of the named settings is not above 0; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise PlanError(f"`{name}` must be above 0, got {value}.")
