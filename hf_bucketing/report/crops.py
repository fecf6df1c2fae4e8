"""Samples in their buckets: those that lose most of their frame, and some at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..buckets.assignment import has_bucket
from ..buckets.sizes import Size, cover_resize, crop_box
from ..randomness import Purpose, generator
from .measure import Subject

WORST_BUCKETS = 6
"""Buckets of which the worst crops are shown."""
PER_BUCKET = 3
"""Samples that are shown of each of them."""
RANDOM_SAMPLES = 24
"""Samples that are shown as the model sees them."""


class SampleCrop(NamedTuple):
    """A sample and what its bucket keeps of it.

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


def worst_crops(subject: Subject) -> tuple[SampleCrop, ...]:
    """Return samples that are cropped, of the buckets that crop one of their samples most; the worst bucket first."""
    targets = subject.bucketed
    rows = np.flatnonzero(has_bucket(targets.bucket_id) & (targets.kept_area < 1))
    rows = rows[np.lexsort((rows, targets.kept_area[rows], targets.bucket_id[rows]))]
    starts = np.unique(targets.bucket_id[rows], return_index=True)[1]
    ends = np.minimum(np.append(starts[1:], len(rows)), starts + PER_BUCKET)
    worst = np.argsort(targets.kept_area[rows[starts]], kind="stable")[:WORST_BUCKETS]
    return _crops(subject, [row for group in worst.tolist() for row in rows[starts[group] : ends[group]].tolist()])


def random_samples(subject: Subject) -> tuple[SampleCrop, ...]:
    """Return samples that have a bucket, drawn by the report's seed, in the order of their rows."""
    rows = np.flatnonzero(has_bucket(subject.bucketed.bucket_id))
    rng = generator(Purpose.REPORT_SAMPLES, subject.config.seed)
    return _crops(subject, np.sort(rng.choice(rows, min(RANDOM_SAMPLES, len(rows)), replace=False)).tolist())


def _crops(subject: Subject, rows: Sequence[int]) -> tuple[SampleCrop, ...]:
    targets = subject.bucketed
    return tuple(
        SampleCrop(
            row=row,
            bucket_id=int(targets.bucket_id[row]),
            size=Size(*(int(column[row]) for column in subject.sizes)),
            target=Size(*(int(column[row]) for column in targets.sizes)),
            kept_area=float(targets.kept_area[row]),
            kept_frames=float(targets.kept_frames[row]),
        )
        for row in rows
    )
