"""ai-toolkit's buckets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...buckets.arrays import IntArray
from ...buckets.sizes import LatentSpec
from ...buckets.table import BucketTable
from ..measure import Sizes, largest_areas
from .views import Batches, Taken, count_skipped, cover


@dataclass(frozen=True, slots=True, kw_only=True)
class AIToolkit:
    """ai-toolkit: a size for each row, at most of one area, and one number of frames.

    Sides are scaled down to the area and rounded to steps, of the four ways to the one nearest the area. Small rows
    keep about their area. All videos get `num_frames`, spread evenly over the whole video (`shrink_video_to_frames`,
    on by default), so that their speed changes. The last batch of a bucket repeats its own samples.

    Source: ostris/ai-toolkit 27a03a91, toolkit/buckets.py, dataloader_mixins.py, data_loader.py and
    config_modules.py.

    Args:
        resolution (`int`): Side of a square of the largest area.
        num_frames (`int`): Frames of a video; with 1, videos are skipped.
        step (`int`): Sides are multiples of this many pixels, which the model fixes.
    """

    resolution: int
    num_frames: int
    step: int

    @classmethod
    def like(cls, table: BucketTable, spec: LatentSpec) -> AIToolkit:
        """Return the rule for the largest area and most frames of a table."""
        areas = largest_areas(table.sizes)
        side = math.isqrt(max(areas.values()))
        return cls(resolution=side, num_frames=max(areas), step=spec.spatial_stride * spec.patch[-1])

    def views(self, sizes: Sizes) -> Taken:
        """Return the views of images and videos."""
        videos = sizes.frames > 1
        rows = np.flatnonzero(~videos | (self.num_frames > 1))
        frames, heights, widths = sizes.select(rows)
        target = np.where(frames > 1, self.num_frames, 1)
        sides = self._buckets(heights, widths)
        views = cover(sizes, rows, Sizes(target, *sides), rounding=np.ceil, used_frames=frames)
        return Taken(views._replace(retimed=frames != target), count_skipped(videos=videos & (self.num_frames == 1)))

    def _buckets(self, heights: IntArray, widths: IntArray) -> tuple[IntArray, IntArray]:
        """Return the height and width of each bucket."""
        area, limit = heights * widths, self.resolution**2
        wanted = np.minimum(area, limit)
        scale = (wanted / area) ** 0.5
        low, high = (
            np.stack([rounding(side * scale / self.step) for side in (heights, widths)]).astype(np.int64) * self.step
            for rounding in (np.floor, np.ceil)
        )
        ways = np.stack([low, [high[0], low[1]], [low[0], high[1]], high])
        areas = ways[:, 0] * ways[:, 1]
        usable = (areas > 0) & (areas <= limit)
        distance = np.where(usable, np.abs(areas - wanted), np.iinfo(np.int64).max)
        best = ways[distance.argmin(axis=0), :, np.arange(len(area))]
        height, width = np.where(usable.any(axis=0), best.T, np.maximum(low, self.step))
        return height, width

    def batches(self, counts: IntArray, *, batch_size: int, num_processes: int) -> Batches:
        """Return the batches of one process; the trainer does not shard its loader."""
        number = int((-(-counts // batch_size)).sum())
        note = "Its loader is not sharded: every process draws all of these batches." if num_processes > 1 else ""
        return Batches(number, dropped=0, repeated=number * batch_size - int(counts.sum()), note=note)
