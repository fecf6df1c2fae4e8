"""Sizes of diffusers' DreamBooth examples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...buckets.arrays import IntArray
from ...buckets.sizes import LatentSpec
from ...buckets.table import BucketTable
from ..measure import Sizes, largest_areas
from .views import Batches, Taken, complete_steps, count_skipped, cover


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
