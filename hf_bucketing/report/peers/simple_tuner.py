"""SimpleTuner's aspect buckets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...buckets.arrays import FloatArray, IntArray
from ...buckets.sizes import LatentSpec
from ...buckets.table import BucketTable
from ..measure import Sizes, largest_areas
from .views import Batches, Taken, count_skipped, cover

_AREAS = {0.25: 512**2, 0.5: 768**2, 1.0: 1024**2, 2.0: 1536**2, 4.0: 2048**2}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleTuner:
    """SimpleTuner: one size for each aspect ratio of two digits, and one number of frames.

    A row is scaled to cover the size of its aspect ratio and cropped to it, though `crop` is off by default. Of two
    ratios whose sizes have equal rounded ratios, the first that occurs decides the size. Shorter videos than
    `num_frames` are skipped, others keep their first frames. The trainer divides by the rounded ratio, so that rows
    are skipped too whose ratio rounds to 0. A bucket of fewer samples than a batch is dropped; the last batch of a
    bucket draws samples again.

    Source: bghira/SimpleTuner bc8e6ab7, simpletuner/helpers/multiaspect/image.py and sampler.py,
    image_manipulation/training_sample.py, metadata/backends/base.py and data_backend/config/image.py.

    Args:
        megapixels (`float`): Area to train at.
        num_frames (`int`): Frames of a video.
        alignment (`int`): Sides are multiples of this many pixels (`--aspect_bucket_alignment`).
    """

    megapixels: float
    num_frames: int
    alignment: int = 64

    @classmethod
    def like(cls, table: BucketTable, spec: LatentSpec) -> SimpleTuner:
        """Return the rule for the largest area and most frames of a table."""
        areas = largest_areas(table.sizes)
        return cls(megapixels=max(areas.values()) / 1e6, num_frames=max(areas))

    def views(self, sizes: Sizes) -> Taken:
        """Return the views of images, and of videos that are long enough."""
        videos = sizes.frames > 1
        short = videos & (sizes.frames < self.num_frames)
        of_images = videos & (self.num_frames == 1)
        rounded = _two_digits(sizes.widths / sizes.heights)
        narrow = (rounded == 0) & ~short & ~of_images
        rows = np.flatnonzero(~short & ~of_images & ~narrow)
        _, heights, widths = sizes.select(rows)
        ratios, first, inverse = np.unique(rounded[rows], return_index=True, return_inverse=True)
        order = np.argsort(first)
        looked_up = self._targets(ratios[order].tolist())[np.argsort(order)][inverse]
        targets = Sizes(np.where(videos[rows], self.num_frames, 1), *looked_up[:, 4:].T)
        resized = self._resized(heights, widths, looked_up)
        views = cover(sizes, rows, targets)._replace(resized_heights=resized[0], resized_widths=resized[1])
        skipped = count_skipped(
            videos=of_images, fewer_frames_than_num_frames=short, aspect_ratio_that_rounds_to_0=narrow
        )
        return Taken(views, skipped)

    def _resized(self, heights: IntArray, widths: IntArray, targets: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return height and width of frames before the crop; `targets` are rows of [`SimpleTuner._targets`]."""
        ratio = widths / heights
        height, width, known_height, known_width, final_height, final_width = targets.T
        tall = width < height
        resized_height = np.where(tall, np.trunc(width / ratio), height)
        resized_width = np.where(tall, width, np.trunc(height * ratio))
        wider, taller = known_width - resized_width, known_height - resized_height
        more_width = np.where(wider > 0, wider, np.where(taller > 0, np.trunc(taller * ratio), 0))
        more_height = np.where(wider > 0, np.trunc(wider / ratio), np.maximum(taller, 0))
        resized_height, resized_width = resized_height + more_height, resized_width + more_width
        exact = heights == widths
        resized_height, resized_width = (
            np.where(exact, side, resized) for side, resized in ((height, resized_height), (width, resized_width))
        )
        square = (final_height == final_width) & (resized_width < final_width)
        return np.where(square, final_height, resized_height), np.where(square, final_width, resized_width)

    def _targets(self, ratios: list[float]) -> IntArray:
        """Return three sizes of each ratio, each as height and width; ratios come in the order in which they occur.

        These are the size computed from the ratio, that of the first ratio whose size has the same rounded ratio, and
        the one that is trained at, of which squares are computed from the area.
        """
        edge = self._rounded(int(math.sqrt(self.megapixels * 1e6)))
        area = next((area for key, area in _AREAS.items() if abs(self.megapixels - key) < 0.05), self.megapixels * 1e6)
        square = self._rounded(math.sqrt(area))
        known: dict[float, tuple[int, int]] = {}
        sizes = []
        for ratio in ratios:
            size = self._rounded(edge / math.sqrt(ratio)), self._rounded(edge * math.sqrt(ratio))
            first = known.setdefault(round(size[1] / size[0], 2), size)
            final = (square, square) if round(first[1] / first[0], 2) == 1 else first
            sizes.append((*size, *first, *final))
        return np.array(sizes, np.int64).reshape(-1, 6)

    def _rounded(self, side: float) -> int:
        return max(round(side / self.alignment), 1) * self.alignment

    def batches(self, counts: IntArray, *, batch_size: int, num_processes: int) -> Batches:
        """Return the batches, with `--allow_dataset_oversubscription` where the trainer would not start without."""
        step = batch_size * num_processes
        kept = counts[counts >= batch_size]
        small = kept < step
        repeats = np.where(small, -(-step // kept), 1)
        per_process = -(-(kept * repeats) // num_processes)
        number = int((-(-per_process // batch_size)).sum()) * num_processes
        drawn, samples = number * batch_size, int(kept.sum())
        refused = int(np.count_nonzero(small))
        note = (
            f"{refused:,} buckets hold fewer samples than a step: it needs --allow_dataset_oversubscription to start."
        )
        return Batches(number, int(counts.sum()) - samples, drawn - samples, note if refused else "")


def _two_digits(values: FloatArray) -> FloatArray:
    """Return values rounded to two digits as Python rounds them: halves by their exact binary value."""
    rounded = np.round(values, 2)
    ties = np.flatnonzero(np.abs(values * 100 % 1 - 0.5) < 1e-6)
    rounded[ties] = [round(value, 2) for value in values[ties].tolist()]
    return rounded
