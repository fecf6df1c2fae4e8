"""Where samples go: a bucket, or a named reason why not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .errors import BucketingError

IntArray = npt.NDArray[np.int64]


class Rejection(IntEnum):
    """Why a sample has no bucket; `NONE` means that it has one.

    Example:
        >>> Rejection.TOO_SMALL.label
        'too_small'
    """

    NONE = 0
    ASPECT = 1
    """No bucket's aspect ratio is near enough."""
    TOO_SHORT = 2
    """Fewer frames than any bucket of its kind (images: one frame, videos: more)."""
    TOO_SMALL = 3
    """Every bucket of a near aspect ratio would enlarge the sample by more than `max_upscale`."""
    UNREADABLE = 4
    """Its metadata could not be read (negative sizes)."""
    EMPTY = 5
    """It holds no frame or no pixel (a size of zero)."""
    CAPTION = 6
    """Its caption is missing or no text (sizes of `CAPTION_SIZE`)."""

    @property
    def label(self) -> str:
        """The name as a `rejection` column holds it, such as `"too_small"`."""
        return self.name.lower()


CAPTION_SIZE = -2
"""Width, height and number of frames of a row that is left out for its caption; those of unreadable rows are −1.

So it stays out wherever sizes are turned into buckets or tokens, and its reason stays known.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentRule:
    """How near a sample must come to its bucket.

    Args:
        metric (`"log"` or `"linear"`): Aspect ratios are compared as |ln(ratio ÷ bucket's ratio)|, which treats
            portrait and landscape alike, or as |ratio − bucket's ratio|, as NovelAI does.
        max_aspect_error (`float`, *optional*): Largest error in that metric. Defaults to ln 2 for `"log"`, which
            rejects a sample of which more than half would be cropped away, and to NovelAI's 4 for `"linear"`, where
            the error must stay below it.
        max_upscale (`float`): Largest factor by which cover-resize may enlarge a sample; 1.0 means never.

    Raises:
        BucketingError: On an unknown metric or a limit that is not above 0.
    """

    metric: Literal["log", "linear"] = "log"
    max_aspect_error: float | None = None
    max_upscale: float = 1.0

    def __post_init__(self) -> None:
        if self.metric not in ("log", "linear"):
            raise BucketingError(f'metric must be "log" or "linear", got {self.metric!r}.')
        if not self.max_upscale > 0 or (self.max_aspect_error is not None and not self.max_aspect_error > 0):
            raise BucketingError(f"`max_upscale` and `max_aspect_error` must be above 0, got {self}.")

    @property
    def aspect_limit(self) -> float:
        """The limit that holds: `max_aspect_error`, or the default of the metric."""
        if self.max_aspect_error is not None:
            return self.max_aspect_error
        return math.log(2) if self.metric == "log" else 4.0

    def is_near(self, error: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.bool_]:
        """Return whether aspect errors in the rule's metric are within its limit; shape as given."""
        return error <= self.aspect_limit if self.metric == "log" else error < self.aspect_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Where each sample goes.

    Attributes:
        bucket_id (`int32`, shape `(n,)`): Position in the table, −1 for a rejected sample.
        rejection (`int8`, shape `(n,)`): A [`Rejection`] per sample, 0 where there is none.
        aspect_error (`float32`, shape `(n,)`): Distance to the bucket's aspect ratio in the rule's metric, NaN if
            rejected.
    """

    bucket_id: npt.NDArray[np.int32]
    rejection: npt.NDArray[np.int8]
    aspect_error: npt.NDArray[np.float32]


def as_columns(*columns: npt.ArrayLike) -> tuple[IntArray, ...]:
    """Return the columns of frames, heights and widths as `int64` arrays of one length."""
    arrays = tuple(np.atleast_1d(np.asarray(column, np.int64)) for column in columns)
    if len({array.shape for array in arrays}) != 1:
        raise BucketingError(f"frames, heights and widths must be equally long, got {[a.shape for a in arrays]}.")
    return arrays


def unusable(*columns: IntArray) -> npt.NDArray[np.int8]:
    """Return `CAPTION` where all are `CAPTION_SIZE`, `UNREADABLE` where one is negative, `EMPTY` where one is zero."""
    smallest, largest = np.minimum.reduce(columns), np.maximum.reduce(columns)
    reasons = [
        (largest == CAPTION_SIZE) & (smallest == CAPTION_SIZE),
        smallest < 0,
        smallest == 0,
    ]
    return np.select(reasons, [Rejection.CAPTION, Rejection.UNREADABLE, Rejection.EMPTY], 0).astype(np.int8)


def count_rejections(rejection: npt.ArrayLike) -> dict[str, int]:
    """Return how many samples were rejected for each reason that occurs, by its label, in the order of [`Rejection`].

    Args:
        rejection (array, shape `(n,)`): A `rejection` column, or the numbers of an [`Assignment`].

    Example:
        >>> count_rejections(["too_small", "none", "aspect", "too_small"])
        {'aspect': 1, 'too_small': 2}
    """
    values = np.asarray(rejection)
    counts = (
        (reason.label, int(np.count_nonzero(values == (reason.label if values.dtype.kind in "UO" else reason))))
        for reason in Rejection
        if reason != Rejection.NONE
    )
    return {label: count for label, count in counts if count}
