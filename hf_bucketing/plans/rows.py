"""Choose the rows of an epoch, and how often each occurs: rejections, weights, and rows seen before a restart."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import BoolArray, FloatArray, IntArray
from ..errors import PlanError
from ..randomness import Purpose, generator


class EpochRows(NamedTuple):
    """The rows that are left of an epoch.

    Attributes:
        rows (`int64`, shape `(n,)`): Row numbers in rising order; a repeated row occurs several times.
        drop_reasons (mapping of `str` to `int`): Number of rows that the epoch does not hold, by reason: `rejected`,
            `oversize`, `weight`.
        consumed (`int`): Number of occurrences seen before.
        seen (`int64`, shape `(k,)`): Different rows among the consumed ones.
        repeats (`bool`): Whether a row may occur more than once.
    """

    rows: IntArray
    drop_reasons: dict[str, int]
    consumed: int
    seen: IntArray
    repeats: bool


def epoch_rows(
    usable: BoolArray,
    *,
    oversize: BoolArray | None = None,
    weights: npt.ArrayLike | None = None,
    consumed: npt.ArrayLike | None = None,
    seed: int,
    epoch: int,
) -> EpochRows:
    """Choose the rows of an epoch.

    Args:
        usable (`bool`, shape `(n,)`): False for rejected rows.
        oversize (`bool`, shape `(n,)`, *optional*): True for rows to drop because no batch can hold them.
        weights (array of `float`, shape `(n,)`, *optional*): Occurrences of each row per epoch, at least 0; see
            [`occurrences`]. By default 1.
        consumed (array of `int`, *optional*): Row numbers seen in this epoch, with repetitions.
        seed (`int`): Not negative.
        epoch (`int`): Not negative.

    Returns:
        [`EpochRows`]: All occurrences but the consumed ones.

    Raises:
        PlanError: If there are not as many weights as rows, a weight is negative or not finite, or a consumed row
            does not exist.
    """
    reasons = {"rejected": len(usable) - int(np.count_nonzero(usable))}
    if oversize is not None:
        reasons["oversize"] = int(np.count_nonzero(usable & oversize))
        usable = usable & ~oversize
    if weights is None and (consumed is None or not np.size(consumed)):
        return EpochRows(np.flatnonzero(usable), reasons, 0, np.zeros(0, np.int64), False)
    counts = usable.astype(np.int64)
    if weights is not None:
        counts = np.where(usable, occurrences(_checked(weights, len(usable)), seed=seed, epoch=epoch), 0)
        reasons["weight"] = int(np.count_nonzero(usable & (counts == 0)))
    total = int(counts.sum())
    different = np.zeros(0, np.int64)
    if consumed is not None and np.size(consumed):
        seen = np.asarray(consumed, np.int64)
        if seen.min() < 0 or seen.max() >= len(usable):
            raise PlanError(f"Consumed rows must be from 0 to {len(usable) - 1}, got {seen.min()} to {seen.max()}.")
        times = np.bincount(seen, minlength=len(usable))
        different = np.flatnonzero(times)
        counts = np.maximum(counts - times, 0)
    repeats = bool(len(counts)) and int(counts.max()) > 1
    rows = np.repeat(np.arange(len(usable)), counts)
    return EpochRows(rows, reasons, total - len(rows), different, repeats)


def shuffled(values: IntArray, rng: np.random.Generator | None) -> IntArray:
    """Return values in random order, or in their own without a generator."""
    return values if rng is None else rng.permutation(values)


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


def _checked(weights: npt.ArrayLike, num_rows: int) -> FloatArray:
    values = np.asarray(weights, np.float64)
    if values.shape != (num_rows,):
        raise PlanError(f"`weights` needs one value per row: expected shape ({num_rows},), got {values.shape}.")
    if len(values) and not (np.isfinite(values).all() and values.min() >= 0):
        raise PlanError("`weights` are occurrences of each row per epoch; they must be finite and at least 0.")
    return values
