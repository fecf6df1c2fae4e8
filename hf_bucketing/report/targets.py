"""The size that each sample is trained at, and what it loses on the way there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray, IntArray
from ..buckets.assignment import as_columns
from ..buckets.open_table import open_table
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..errors import BucketingError
from .config import ReportConfig, SizeColumns


class Sizes(NamedTuple):
    """Sizes of all samples as `int64` arrays of shape `(n,)`, in frames and pixels."""

    frames: IntArray
    heights: IntArray
    widths: IntArray


class Targets(NamedTuple):
    """Target of each sample; every array has shape `(n,)`.

    Attributes:
        bucket_id: In the table that the targets come from, −1 for a rejected sample.
        rejection: A [`Rejection`][hf_bucketing.Rejection], 0 where there is none.
        num_tokens: 0 for a rejected sample.
        sizes: Target sizes; those of rejected samples mean nothing.
    """

    bucket_id: npt.NDArray[np.int32]
    rejection: npt.NDArray[np.int8]
    num_tokens: IntArray
    sizes: Sizes


def read_sizes(columns: SizeColumns) -> Sizes:
    """Return the columns as arrays.

    Raises:
        BucketingError: If they are empty or differ in length.
    """
    sizes = Sizes(*as_columns(*columns))
    if not len(sizes.frames):
        raise BucketingError("The data set is empty: there is nothing to report about.")
    return sizes


def bucket_targets(sizes: Sizes, table: BucketTable, *, spec: LatentSpec, config: ReportConfig) -> Targets:
    """Send each sample to its bucket.

    Raises:
        BucketingError: If a bucket of the table does not divide into whole tokens of `spec`.
    """
    result = table.assign(*sizes, rule=config.rule)
    of_bucket = np.array(table.sizes, np.int64)[np.maximum(result.bucket_id, 0)]
    return Targets(
        bucket_id=result.bucket_id,
        rejection=result.rejection,
        num_tokens=table.num_tokens(result.bucket_id, spec=spec),
        sizes=Sizes(*of_bucket.T),
    )


def own_targets(sizes: Sizes, *, spec: LatentSpec, config: ReportConfig) -> Targets:
    """Leave each sample its own size in whole tokens, shrunk first where its frame exceeds `config.max_area`.

    Raises:
        BucketingError: If a sample is too large for the open table.
    """
    shrunk = sizes if config.max_area is None else _shrink(sizes, config.max_area)
    table = open_table(spec)
    result = table.assign(*shrunk)
    usable = result.bucket_id >= 0
    return Targets(
        bucket_id=result.bucket_id,
        rejection=result.rejection,
        num_tokens=table.num_tokens(result.bucket_id, spec=spec),
        sizes=Sizes(*spec.snap_arrays(*(np.where(usable, column, 1) for column in shrunk))),
    )


def _shrink(sizes: Sizes, max_area: int) -> Sizes:
    """Shrink frames above `max_area` to it, sides rounded down to pixels: 1000×4000 within 10⁶ -> 500×2000."""
    large = (np.minimum(sizes.heights, sizes.widths) > 0) & (sizes.heights * sizes.widths > max_area)
    scale = np.sqrt(max_area / np.where(large, sizes.heights * sizes.widths, max_area))
    heights, widths = (
        np.where(large, np.maximum((side * scale).astype(np.int64), 1), side) for side in (sizes.heights, sizes.widths)
    )
    return Sizes(sizes.frames, heights, widths)


def kept_area(sizes: Sizes, targets: Sizes) -> FloatArray:
    """Return which share of each sample's frame lies inside its target after cover-resize, before pixels are rounded.

    A frame of 100×200 that covers a square target keeps a half.
    """
    across, down = sizes.widths * targets.heights, sizes.heights * targets.widths
    share: FloatArray = np.minimum(across, down) / np.maximum(np.maximum(across, down), 1)
    return share


def kept_frames(sizes: Sizes, targets: Sizes) -> FloatArray:
    """Return which share of each sample's frames its target has."""
    share: FloatArray = targets.frames / np.maximum(sizes.frames, 1)
    return share


def resize_scale(sizes: Sizes, targets: Sizes) -> FloatArray:
    """Return the factor by which cover-resize scales each sample's sides; above 1 it enlarges."""
    heights, widths = np.maximum(sizes.heights, 1), np.maximum(sizes.widths, 1)
    scale: FloatArray = np.maximum(targets.heights / heights, targets.widths / widths)
    return scale
