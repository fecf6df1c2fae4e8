"""NovelAI's aspect ratio bucketing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...buckets.arrays import IntArray
from ...buckets.ladders import novelai_ladder
from ...buckets.sizes import LatentSpec
from ...buckets.table import BucketTable
from ..measure import Sizes
from .views import Batches, Taken, count_skipped, cover, nearest

_MAX_ERROR = 4.0
"""Limit of |width ÷ height − bucket's|, exclusive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NovelAI:
    """NovelAI's aspect ratio bucketing of images, with its own 19 buckets.

    An image takes the bucket of the nearest width ÷ height, and is skipped if they differ by 4 or more. An
    epoch drops samples until whole steps are left. Each process crops the remainder of each of its buckets to
    512×512, the base size.

    Source: NovelAI/novelai-aspect-ratio-bucketing 6e977c54, bucketmanager.py.
    """

    @classmethod
    def like(cls, table: BucketTable, spec: LatentSpec) -> NovelAI:
        """Return the rule with its own buckets; it takes nothing of the table."""
        return cls()

    def views(self, sizes: Sizes) -> Taken:
        """Return the views of images; videos are skipped."""
        _, heights, widths = np.array(novelai_ladder().sizes).T
        ratios = widths / heights
        ratio = sizes.widths / sizes.heights
        bucket = nearest(ratio, ratios)
        images = sizes.frames == 1
        near = np.abs(ratios[bucket] - ratio) < _MAX_ERROR
        rows = np.flatnonzero(images & near)
        targets = Sizes(sizes.frames[rows], heights[bucket[rows]], widths[bucket[rows]])
        return Taken(
            cover(sizes, rows, targets), count_skipped(videos=~images, no_bucket_near_their_shape=images & ~near)
        )

    def batches(self, counts: IntArray, *, batch_size: int, num_processes: int) -> Batches:
        """Return the batches; processes are taken to get even shares of each bucket, where the trainer draws them."""
        samples, step = int(counts.sum()), batch_size * num_processes
        dropped = samples % step
        shares = np.add.outer(-np.arange(num_processes), counts + num_processes - 1) // num_processes
        moved = int((shares % batch_size).sum()) - dropped
        note = f"About {moved:,} samples meet in batches of 512×512, cropped to that." if moved > 0 else ""
        return Batches(samples // step * num_processes, dropped, note=note)
