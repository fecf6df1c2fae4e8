"""What a trainer makes of rows: the sizes of its samples, and the batches that they fill.

Every peer's rule is written anew from its public code, which the docstring of its class names. A rule is a frozen
dataclass of the settings that it reads, with two methods:

- `views(sizes)` gives the samples that the trainer makes of rows; a row may give several, or none.
- `batches(counts, batch_size=…, num_processes=…)` gives the batches of an epoch, from the samples of each bucket.

Settings without a value in a peer's configuration are those of the table (`like`): every user of these trainers
chooses an area and numbers of frames, and rows are compared at the same ones. All others are the trainer's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...buckets.arrays import BoolArray, FloatArray, IntArray
from ..measure import Sizes

_CHUNK = 1 << 16


class Views(NamedTuple):
    """Samples of equal size that a trainer makes of a row; every array has shape `(m,)`.

    Attributes:
        rows: Row of each entry.
        sizes: Frames, height and width after the crop.
        resized_heights: Height of the whole frame after the resize, before the crop.
        resized_widths: Width of the whole frame after the resize.
        clips: Samples of this size that the row gives.
        used_frames: Frames of the row that these samples cover together.
        retimed: Whether the frames of the row are spread over another duration.
        buckets: Number of the bucket, whose samples meet in batches.
    """

    rows: IntArray
    sizes: Sizes
    resized_heights: FloatArray
    resized_widths: FloatArray
    clips: IntArray
    used_frames: IntArray
    retimed: BoolArray
    buckets: IntArray


class Taken(NamedTuple):
    """The views of rows, and the number of rows that give none by reason."""

    views: Views
    skipped: Mapping[str, int]


class Batches(NamedTuple):
    """The batches of an epoch, of all processes.

    Attributes:
        number: Number of batches.
        dropped: Samples in none of them.
        repeated: Samples that are drawn again to fill them.
        note: What else happens to samples, as a sentence.
    """

    number: int
    dropped: int
    repeated: int = 0
    note: str = ""


class Peer(Protocol):
    """The rule of a trainer."""

    def views(self, sizes: Sizes) -> Taken:
        """Return what the trainer makes of rows of these sizes, all of which are at least 1."""

    def batches(self, counts: IntArray, *, batch_size: int, num_processes: int) -> Batches:
        """Return the batches of an epoch, from the number of samples of each bucket."""


def cover(
    sizes: Sizes,
    rows: IntArray,
    targets: Sizes,
    *,
    rounding: Callable[[FloatArray], npt.NDArray[Any]] = np.asarray,
    clips: IntArray | None = None,
    used_frames: IntArray | None = None,
    buckets: IntArray | None = None,
) -> Views:
    """Return views of rows whose frames are scaled until they cover their target, and cropped.

    Args:
        sizes ([`Sizes`]): Sizes of all rows.
        rows (array of `int`, shape `(m,)`): Row of each view.
        targets ([`Sizes`]): Sizes of the views.
        rounding (callable): Function that rounds resized sides; by default they stay fractions.
        clips (array of `int`, shape `(m,)`, *optional*): As in [`Views`], by default 1.
        used_frames (array of `int`, shape `(m,)`, *optional*): As in [`Views`], by default those of the target.
        buckets (array of `int`, shape `(m,)`, *optional*): As in [`Views`], by default one of each size.
    """
    _, heights, widths = sizes.select(rows)
    scale: FloatArray = np.maximum(targets.widths / widths, targets.heights / heights)
    return Views(
        rows=rows,
        sizes=targets,
        resized_heights=np.asarray(rounding(heights * scale), np.float64),
        resized_widths=np.asarray(rounding(widths * scale), np.float64),
        clips=np.ones(len(rows), np.int64) if clips is None else clips,
        used_frames=targets.frames if used_frames is None else used_frames,
        retimed=np.zeros(len(rows), np.bool_),
        buckets=(targets.frames << 40) + (targets.heights << 20) + targets.widths if buckets is None else buckets,
    )


def join(parts: list[Views]) -> Views:
    """Return the views of several parts as one; of none, no views."""
    if not parts:
        none = np.zeros(0, np.int64)
        return cover(Sizes(none, none, none), none, Sizes(none, none, none))
    arrays = [(*part[:1], *part.sizes, *part[2:]) for part in parts]
    rows, frames, heights, widths, *others = map(np.concatenate, zip(*arrays, strict=True))
    return Views(rows, Sizes(frames, heights, widths), *others)


def nearest(values: FloatArray, targets: FloatArray, allowed: Callable[[slice], BoolArray] | None = None) -> IntArray:
    """Return for each value the position of the nearest target, the first of several; −1 where none is allowed.

    Args:
        values (array of `float`, shape `(n,)`): Values.
        targets (array of `float`, shape `(k,)`): Targets.
        allowed (callable, *optional*): Function from a slice of the values to which targets they may have, shape
            `(rows, k)`; by default all.
    """
    positions = np.empty(len(values), np.int64)
    for rows in _slices(len(values)):
        distances = np.abs(targets - values[rows, None])
        if allowed is not None:
            distances[~allowed(rows)] = np.inf
        positions[rows] = np.where(np.isfinite(distances).any(axis=1), distances.argmin(axis=1), -1)
    return positions


def _slices(number: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, number, _CHUNK))


def count_skipped(**masks: BoolArray) -> dict[str, int]:
    """Return how many rows each mask marks, those that mark none omitted; blanks replace underscores."""
    counts = {name.replace("_", " "): int(np.count_nonzero(mask)) for name, mask in masks.items()}
    return {name: count for name, count in counts.items() if count}


def complete_steps(batches: int, num_processes: int) -> int:
    """Return the number of batches in whole steps of all processes, as accelerate deals them with `drop_last`."""
    return batches // num_processes * num_processes
