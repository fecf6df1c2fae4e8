"""Samples that lose most of their frame to their bucket."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..buckets.assignment import has_bucket
from ..buckets.sizes import Size, cover_resize, crop_box
from .measure import Subject

WORST_BUCKETS = 6
"""Buckets of which the worst crops are shown."""
PER_BUCKET = 3
"""Samples that are shown of each of them."""


class WorstCrop(NamedTuple):
    """A sample of which its bucket keeps little.

    Attributes:
        row (`int`): Row of the data set.
        bucket_id (`int`): Its bucket.
        size ([`Size`][hf_bucketing.Size]): Frames, height and width of the sample.
        target ([`Size`][hf_bucketing.Size]): Those of the bucket.
        kept_area (`float`): Share of the frame inside the bucket.
        kept_frames (`float`): Share of the frames that the bucket has.
    """

    row: int
    bucket_id: int
    size: Size
    target: Size
    kept_area: float
    kept_frames: float

    def box(self) -> tuple[float, float, float, float]:
        """Return left, top, width and height of what a crop in the centre keeps, as shares of the frame's sides."""
        height, width = cover_resize(self.size.height, self.size.width, target=self.target)
        kept = crop_box(height, width, target=self.target)
        return kept.left / width, kept.top / height, kept.width / width, kept.height / height


def worst_crops(subject: Subject) -> tuple[WorstCrop, ...]:
    """Return samples that are cropped, of the buckets that crop one of their samples most; the worst bucket first."""
    targets = subject.bucketed
    rows = np.flatnonzero(has_bucket(targets.bucket_id) & (targets.kept_area < 1))
    rows = rows[np.lexsort((rows, targets.kept_area[rows], targets.bucket_id[rows]))]
    starts = np.unique(targets.bucket_id[rows], return_index=True)[1]
    ends = np.append(starts[1:], len(rows))
    worst = np.argsort(targets.kept_area[rows[starts]], kind="stable")[:WORST_BUCKETS]
    found = []
    for group in worst.tolist():
        for row in rows[starts[group] : min(int(ends[group]), int(starts[group]) + PER_BUCKET)].tolist():
            found.append(
                WorstCrop(
                    row=row,
                    bucket_id=int(targets.bucket_id[row]),
                    size=Size(*(int(column[row]) for column in subject.sizes)),
                    target=Size(*(int(column[row]) for column in targets.sizes)),
                    kept_area=float(targets.kept_area[row]),
                    kept_frames=float(targets.kept_frames[row]),
                )
            )
    return tuple(found)
