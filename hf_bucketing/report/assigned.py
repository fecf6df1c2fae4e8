"""What preparing a data set says: the buckets in use, and the rejected rows with the option that would keep them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray
from ..buckets.assignment import AssignmentRule, Rejection, count_rejections
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from .config import SizeColumns
from .targets import Sizes, kept_area, read_sizes, resize_scale
from .text import Line, columns, percent, size_label

_UPSCALES = (1.1, 1.25, 1.5, 2, 3, 4, 8)

_REASONS = {
    Rejection.ASPECT: (
        "no bucket is near their aspect ratio",
        "raise --max_aspect_ratio, which adds buckets, or --max_aspect_error, which crops more",
    ),
    Rejection.TOO_SHORT: (
        "fewer frames than every bucket of their kind",
        "add a smaller number of frames to --bucket_frames, 1 for images",
    ),
    Rejection.TOO_SMALL: ("every bucket near their aspect ratio would enlarge them", ""),  # depends on their sizes
    Rejection.UNREADABLE: (
        "their size or frames could not be read",
        "repair the files; --on_error raise says what is wrong with the first one",
    ),
    Rejection.EMPTY: ("they hold no frame or no pixel", "write the files again or remove the rows"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedRows:
    """Rows with their sizes, and the buckets that they were given.

    Args:
        sizes ([`SizeColumns`]): Of all rows.
        bucket_id (array of `int`, shape `(n,)`): −1 for a rejected row.
        rejection (array of `str`, shape `(n,)`): The label of a [`Rejection`][hf_bucketing.Rejection] per row.
        table ([`BucketTable`][hf_bucketing.BucketTable]): That the ids belong to.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
        rule ([`AssignmentRule`][hf_bucketing.AssignmentRule]): By which the rows were assigned.
        name_rows (callable): Returns the file names of some rows, given their numbers.
    """

    sizes: SizeColumns
    bucket_id: npt.ArrayLike
    rejection: npt.ArrayLike
    table: BucketTable
    spec: LatentSpec
    rule: AssignmentRule
    name_rows: Callable[[Sequence[int]], Sequence[str]]


def format_assigned(rows: AssignedRows) -> str:
    """Return the buckets in use, the fullest first, then each kind of rejection with three names and a remedy.

    Raises:
        BucketingError: If there is no row, or a bucket does not divide into whole tokens.
    """
    sizes, ids = read_sizes(rows.sizes), np.asarray(rows.bucket_id, np.int64)
    rejection = np.asarray(rows.rejection)
    of_bucket = Sizes(*np.array(rows.table.sizes, np.int64)[np.maximum(ids, 0)].T)
    area, scale = kept_area(sizes, of_bucket), resize_scale(sizes, of_bucket)
    by_bucket = np.argsort(ids, kind="stable")[np.count_nonzero(ids < 0) :]
    used, starts = np.unique(ids[by_bucket], return_index=True)
    parts = []
    if len(used):
        head = ("bucket", "rows", "kept area", "scale", "enlarged", "tokens")
        members = sorted(np.split(by_bucket, starts[1:]), key=len, reverse=True)
        parts.append(
            columns([head, *(_bucket_line(rows, int(ids[own[0]]), area[own], scale[own]) for own in members)])
        )
        parts.append("kept area: mean share of a frame inside the bucket; scale: least to largest factor of the sides")
    kept = ids >= 0
    mean = f", kept area {percent(float(area[kept].mean()))} on average" if kept.any() else ""
    parts.append(
        f"{int(kept.sum()):,} of {len(ids):,} rows assigned to {len(used):,} of {len(rows.table):,} buckets{mean}"
    )
    parts += [_rejection_text(rows, sizes, label, rejection == label) for label in count_rejections(rejection)]
    return "\n".join(parts)


def _bucket_line(rows: AssignedRows, bucket: int, area: FloatArray, scale: FloatArray) -> Line:
    size = rows.table.size(bucket)
    low, high = f"{scale.min():.2f}", f"{scale.max():.2f}"
    return (
        size_label(size),
        f"{len(area):,}",
        percent(float(area.mean())),
        low if low == high else f"{low}–{high}",
        f"{np.count_nonzero(scale > 1):,}",
        f"{rows.spec.num_tokens(size):,}",
    )


def _rejection_text(rows: AssignedRows, sizes: Sizes, label: str, mask: npt.NDArray[np.bool_]) -> str:
    reason = Rejection[label.upper()]
    numbers = np.flatnonzero(mask)
    why, remedy = _REASONS[reason]
    if reason == Rejection.TOO_SMALL:
        remedy = _upscale_that_keeps(rows, Sizes(*(column[numbers] for column in sizes)))
    names = ", ".join(rows.name_rows(numbers[:3].tolist()))
    more = ", …" if len(numbers) > 3 else ""
    noun = "row" if len(numbers) == 1 else "rows"
    return f"{len(numbers):,} {noun} rejected: {label} ({why}): {names}{more}\n    to keep them: {remedy}"


def _upscale_that_keeps(rows: AssignedRows, sizes: Sizes) -> str:
    """Return the smallest enlargement that keeps some of these samples, that which keeps most, and other options."""
    kept: dict[int, float] = {}
    for limit in _UPSCALES:
        if limit > rows.rule.max_upscale:
            ids = rows.table.assign(*sizes, rule=replace(rows.rule, max_upscale=limit)).bucket_id
            kept.setdefault(int(np.count_nonzero(ids >= 0)), limit)
    kept.pop(0, None)
    limits = dict.fromkeys([min(kept), max(kept)]) if kept else {}
    options = [f"--max_upscale {kept[count]:g} (keeps {count:,})" for count in limits]
    return ", ".join([*options, "or smaller sizes: --bucket_tokens, --bucket_sizes, --buckets"])
