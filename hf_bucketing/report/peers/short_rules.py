"""Trainers of few rules: ai-toolkit, diffusers' DreamBooth examples, the LTX-2 trainer and NovelAI."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...buckets.arrays import BoolArray, IntArray
from ...buckets.ladders import novelai_ladder
from ...buckets.sizes import LatentSpec, Size
from ...buckets.table import BucketTable
from ..measure import Sizes, largest_areas
from .views import Batches, Taken, complete_steps, count_skipped, cover, nearest


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusersExamples:
    """diffusers' DreamBooth examples for FLUX.2, Qwen-Image, Z-Image and Krea 2: images, cropped to one square.

    This is what they do without `--use_aspect_ratio_buckets`. They scale small images up, and drop incomplete batches
    and steps.

    Source: huggingface/diffusers 58eb52c0, examples/dreambooth/train_dreambooth_lora_flux2.py.

    Args:
        resolution (`int`): Side of the square.
    """

    resolution: int

    @classmethod
    def like(cls, table: BucketTable, spec: LatentSpec) -> DiffusersExamples:
        """Return the rule for a square of the largest area of a table, in whole tokens."""
        step = spec.spatial_stride * spec.patch[-1]
        return cls(resolution=math.isqrt(max(largest_areas(table.sizes).values())) // step * step)

    def views(self, sizes: Sizes) -> Taken:
        """Return the views of images; videos are skipped."""
        images = sizes.frames == 1
        rows = np.flatnonzero(images)
        side = np.full(len(rows), self.resolution)
        views = cover(sizes, rows, Sizes(sizes.frames[rows], side, side), rounding=np.round)
        return Taken(views, count_skipped(videos=~images))

    def batches(self, counts: IntArray, *, batch_size: int, num_processes: int) -> Batches:
        """Return the batches."""
        number = complete_steps(int((counts // batch_size).sum()), num_processes)
        return Batches(number, int(counts.sum()) - number * batch_size)


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
