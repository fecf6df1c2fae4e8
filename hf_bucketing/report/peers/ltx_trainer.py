"""Resolution buckets of the LTX-2 trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...buckets.arrays import BoolArray, IntArray
from ...buckets.sizes import LatentSpec, Size
from ...buckets.table import BucketTable
from ..measure import Sizes
from .views import Batches, Taken, complete_steps, count_skipped, cover, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class LTXTrainer:
    """The LTX-2 trainer: a list of sizes, here those of the table.

    Of the sizes that a row has frames for, it takes the nearest aspect ratio, then the most frames, then the largest
    area: a video may thus get the size of an image. It keeps its first frames. Several sizes need batches of one
    sample; incomplete batches and steps are dropped.

    Source: Lightricks/LTX-2 400fd310, packages/ltx-trainer/scripts/process_videos.py, docs/dataset-preparation.md and
    src/ltx_trainer/trainer.py.

    Args:
        buckets (`tuple` of [`Size`][hf_bucketing.Size]): Values of `--resolution-buckets`.
    """

    buckets: tuple[Size, ...]

    @classmethod
    def like(cls, table: BucketTable, spec: LatentSpec) -> LTXTrainer:
        """Return the rule with all sizes of a table."""
        return cls(buckets=table.sizes)

    def views(self, sizes: Sizes) -> Taken:
        """Return the views of images and videos."""
        ranked = sorted(self.buckets, key=lambda size: (-size.frames, -size.height * size.width))
        frames, heights, widths = np.array(ranked).T
        logs = np.array([math.log(size.width / size.height) for size in ranked])

        def allowed(rows: slice) -> BoolArray:
            return np.asarray(frames <= sizes.frames[rows, None])

        bucket = nearest(np.log(sizes.widths / sizes.heights), logs, allowed)
        rows = np.flatnonzero(bucket >= 0)
        targets = Sizes(*(column[bucket[rows]] for column in (frames, heights, widths)))
        _, height, width = sizes.select(rows)
        wide = width / height > targets.widths / targets.heights
        views = cover(sizes, rows, targets)._replace(
            resized_heights=np.where(wide, targets.heights, height * targets.widths // width).astype(np.float64),
            resized_widths=np.where(wide, width * targets.heights // height, targets.widths).astype(np.float64),
        )
        return Taken(views, count_skipped(fewer_frames_than_every_bucket=bucket < 0))

    def batches(self, counts: IntArray, *, batch_size: int, num_processes: int) -> Batches:
        """Return the batches."""
        size = batch_size if len(counts) == 1 else 1
        number = complete_steps(int(counts.sum()) // size, num_processes)
        note = "" if size == batch_size else "Its batches hold one sample, as several sizes demand."
        return Batches(number, int(counts.sum()) - number * size, note=note)
