"""Why rows were rejected, and the option that would keep them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..buckets.assignment import AssignmentRule, Rejection, count_rejections
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..errors import BucketingError
from .measure import Sizes

EXAMPLES = 3
"""Rows that are named of each kind of rejection."""

_UPSCALES = (1.1, 1.25, 1.5, 2, 3, 4, 8)
_REASONS = {
    Rejection.ASPECT: (
        "no bucket is near their aspect ratio",
        "raise --max_aspect_ratio, which adds buckets, or --max_aspect_error, which crops more",
    ),
    Rejection.TOO_SHORT: ("fewer frames than every bucket of their kind", ""),  # depends on their frames
    Rejection.TOO_SMALL: ("every bucket near their aspect ratio would enlarge them", ""),  # depends on their sizes
    Rejection.UNREADABLE: (
        "their size or frames could not be read",
        "repair the files; --on_error raise says what is wrong with the first ones",
    ),
    Rejection.EMPTY: ("they hold no frame or no pixel", "write the files again or remove the rows"),
    Rejection.CAPTION: (
        "their caption is missing or not a text",
        "add captions, name another --caption_column, or train them without a text: --on_caption_error empty",
    ),
    Rejection.CONDITION: (
        "what they would be shown is missing or does not fit",
        "write those files again; --on_error raise says what is wrong with the first ones",
    ),
    Rejection.TOO_LARGE: (
        "no pack holds as many tokens, or the model has no positions for them",
        "make the files smaller, or train in buckets, which crop them",
    ),
    Rejection.CLIP: ("their clip does not lie in its file", "correct the columns start and end, in seconds"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedRows:
    """Rows that were rejected for one reason.

    Attributes:
        label (`str`): Label of the [`Rejection`][hf_bucketing.Rejection].
        count (`int`): Number of the rows.
        why (`str`): What the reason means.
        remedy (`str`): Options that would keep them.
        examples (`tuple` of `int`): Numbers of the first rows.
        sizes (`tuple` of `tuple[int, int, int]`): Frames, height and width of the examples; negative if unreadable.
    """

    label: str
    count: int
    why: str
    remedy: str
    examples: tuple[int, ...]
    sizes: tuple[tuple[int, int, int], ...]


def explain_rejections(
    sizes: Sizes,
    rejection: npt.NDArray[Any],
    *,
    table: BucketTable,
    rule: AssignmentRule,
    spec: LatentSpec,
    table_of_frames: Callable[[int], BucketTable] | None = None,
) -> tuple[RejectedRows, ...]:
    """Return the rejected rows by reason.

    Args:
        sizes ([`Sizes`]): Sizes of all rows.
        rejection (array, shape `(n,)`): A [`Rejection`][hf_bucketing.Rejection] of each row, or its label.
        table ([`BucketTable`][hf_bucketing.BucketTable]): Table that the rows were assigned by.
        rule ([`AssignmentRule`][hf_bucketing.AssignmentRule]): Rule by which they were assigned.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
        table_of_frames (callable, *optional*): Makes the table for another number of frames, to count what it would
            keep; raises BucketingError for one that has no table. By default it has the heights and widths of `table`.
    """
    if table_of_frames is None:

        def table_of_frames(frames: int) -> BucketTable:
            return BucketTable(sizes=tuple(dict.fromkeys(size._replace(frames=frames) for size in table.sizes)))

    by_label = rejection.dtype.kind not in "iu"
    groups = []
    for label in count_rejections(rejection):
        reason = Rejection[label.upper()]
        rows = np.flatnonzero(rejection == (label if by_label else reason))
        why, remedy = _REASONS[reason]
        if reason == Rejection.TOO_SMALL:
            remedy = _upscale_that_keeps(sizes.select(rows), table, rule)
        if reason == Rejection.TOO_SHORT:
            remedy = _frames_that_keep(sizes.select(rows), table_of_frames, rule, spec)
        examples = rows[:EXAMPLES].tolist()
        example_sizes = tuple((int(frames), int(height), int(width)) for frames, height, width in zip(
            *(column[examples] for column in sizes), strict=True
        ))  # fmt: skip
        groups.append(
            RejectedRows(
                label=label, count=len(rows), why=why, remedy=remedy, examples=tuple(examples), sizes=example_sizes
            )
        )
    return tuple(groups)


def _upscale_that_keeps(sizes: Sizes, table: BucketTable, rule: AssignmentRule) -> str:
    """Return the smallest `--max_upscale` that keeps a sample, the one that keeps most, and other options."""
    kept: dict[int, float] = {}
    for limit in _UPSCALES:
        if limit > rule.max_upscale:
            ids = table.assign(*sizes, rule=replace(rule, max_upscale=limit)).bucket_id
            kept.setdefault(int(np.count_nonzero(ids >= 0)), limit)
    kept.pop(0, None)
    limits = dict.fromkeys([min(kept), max(kept)]) if kept else {}
    options = [f"--max_upscale {kept[count]:g} (keeps {count:,})" for count in limits]
    return ", ".join([*options, "or smaller sizes: --bucket_tokens, --bucket_sizes, --buckets"])


def _frames_that_keep(
    sizes: Sizes, table_of_frames: Callable[[int], BucketTable], rule: AssignmentRule, spec: LatentSpec
) -> str:
    """Return the numbers of frames that keep some of the images and of the videos, and those that keep most."""
    options = []
    for of_kind in (sizes.frames == 1, sizes.frames > 1):
        samples = sizes.select(np.flatnonzero(of_kind))
        valid = {spec.snap(Size(frames, 1, 1)).frames for frames in np.unique(samples.frames).tolist()}
        kept: dict[int, int] = {}
        for frames in sorted(valid, reverse=True):
            try:
                ids = table_of_frames(frames).assign(*samples, rule=rule).bucket_id
            except BucketingError:
                continue
            kept.setdefault(int(np.count_nonzero(ids >= 0)), frames)
        kept.pop(0, None)
        counts = dict.fromkeys([min(kept), max(kept)]) if kept else {}
        options += [f"{kept[count]} (keeps {count:,})" for count in counts]
    if not options:
        return "remove them, as no number of frames would; a higher --target_fps makes more frames of a video"
    return f"add to --bucket_frames, or to the --table: {', '.join(options)}"
