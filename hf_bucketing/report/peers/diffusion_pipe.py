"""diffusion-pipe's aspect ratio, frame and size buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...buckets.arrays import BoolArray, IntArray
from ...buckets.sizes import LatentSpec
from ...buckets.table import BucketTable
from ...errors import BucketingError
from ..measure import Sizes, largest_areas
from .views import Batches, Taken, Views, count_skipped, cover, join, nearest

_KEYS = (
    "resolutions", "size_buckets", "enable_ar_bucket", "ar_buckets", "min_ar", "max_ar", "num_ar_buckets",
    "frame_buckets",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionPipe:
    """diffusion-pipe: aspect ratios × areas × frames, or a list of sizes.

    A row takes the nearest aspect ratio in logarithms, whatever it crops, and the most frames that it has; it is
    trained once at each of `resolutions`. A video shorter than all frame buckets above 1 is skipped. A bucket drops
    samples until whole steps of all processes are left.

    Without a file, aspect ratios are the seven from 0.5 to 2 of its examples/dataset.toml.

    Source: tdrussell/diffusion-pipe 8f83dbf2, utils/dataset.py and models/base.py.

    Args:
        sides (`tuple` of `float`): Sides of squares of the areas to train at.
        ratios (`tuple` of `float`): Aspect ratios of the buckets, rising.
        frames (`tuple` of `int`): Frames of the buckets, rising.
        size_buckets (`tuple` of `tuple[int, int, int]`): Widths, heights and frames, in place of the above.
        pixel_step (`int`): Sides are rounded to the nearest multiple, which the model fixes.
        frame_step (`int`): Frames are rounded down to a multiple and 1.
    """

    sides: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    frames: tuple[int, ...] = (1,)
    size_buckets: tuple[tuple[int, int, int], ...] = ()
    pixel_step: int = 16
    frame_step: int = 4

    @classmethod
    def like(cls, table: BucketTable, spec: LatentSpec) -> DiffusionPipe:
        """Return the rule for the largest area of a table and its numbers of frames."""
        areas = largest_areas(table.sizes)
        keys = {"enable_ar_bucket": True, "min_ar": 0.5, "max_ar": 2.0, "num_ar_buckets": 7}
        side = math.sqrt(max(areas.values()))
        return cls.read([{**keys, "resolutions": [side], "frame_buckets": [*areas]}], table, spec)

    @classmethod
    def read(cls, tables: Sequence[Mapping[str, Any]], table: BucketTable, spec: LatentSpec) -> DiffusionPipe:
        """Return the rule with the settings of a file, the keys of each directory with those around them.

        Raises:
            BucketingError: If directories differ in a setting, or one that the trainer needs is missing.
        """
        steps = {"pixel_step": spec.spatial_stride * spec.patch[-1], "frame_step": spec.temporal_stride}
        rules = {cls._of_directory({key: keys[key] for key in _KEYS if key in keys}, steps) for keys in tables}
        if len(rules) > 1:
            raise BucketingError(
                "Its directories differ in settings, and rows do not say which directory is theirs; write a file for "
                "each and compare one after another."
            )
        return rules.pop()

    @classmethod
    def _of_directory(cls, keys: Mapping[str, Any], steps: Mapping[str, Any]) -> DiffusionPipe:
        try:
            if "size_buckets" in keys:
                sizes = ((int(width), int(height), int(frames)) for width, height, frames in keys["size_buckets"])
                return cls(size_buckets=tuple(sizes), **steps)
            sides = (math.sqrt(math.prod(side)) if isinstance(side, list) else side for side in keys["resolutions"])
            return cls(
                sides=_sorted(sides), ratios=_sorted(_ratios(keys)),
                frames=tuple(sorted({1, *keys.get("frame_buckets", [])})), **steps,
            )  # fmt: skip
        except KeyError as error:
            raise BucketingError(f"It has no {error.args[0]}, which diffusion-pipe needs; add it.") from error

    def views(self, sizes: Sizes) -> Taken:
        """Return the views of images and videos."""
        views = self._in_size_buckets(sizes) if self.size_buckets else self._in_ratios(sizes)
        used = np.isin(np.arange(len(sizes.frames)), views.rows)
        images = sizes.frames == 1
        return Taken(
            views,
            count_skipped(
                fewer_frames_than_every_bucket_of_videos=~images & ~used, no_bucket_of_images=images & ~used
            ),
        )

    def _in_ratios(self, sizes: Sizes) -> Views:
        counts, ratios = np.array(self.frames), np.array(self.ratios)
        frame = np.searchsorted(counts, sizes.frames, side="right") - 1
        rows = np.flatnonzero((counts[frame] > 1) | (sizes.frames == 1))
        ratio = nearest(np.log(sizes.widths / sizes.heights), np.log(ratios))[rows]
        bucket = frame[rows] * len(ratios) + ratio
        parts = []
        for position, side in enumerate(self.sides):
            widths = np.sqrt(side**2 * ratios)
            targets = self._rounded(counts[frame[rows]], (side**2 / widths)[ratio], widths[ratio])
            parts.append(cover(sizes, rows, targets, buckets=bucket * len(self.sides) + position))
        return join(parts)

    def _in_size_buckets(self, sizes: Sizes) -> Views:
        """Return the views in `size_buckets`.

        The trainer ranks the sorted, distinct ratios of the buckets, and takes their positions for those of the
        buckets, which it has sorted by falling frames.
        """
        buckets = np.array(sorted(self.size_buckets, key=lambda size: -size[2]))
        ratios = np.log(_sorted(buckets[:, 0] / buckets[:, 1]))
        frames = buckets[: len(ratios), 2]

        def allowed(rows: slice) -> BoolArray:
            count = sizes.frames[rows, None]
            return np.asarray((frames <= count) & ((frames > 1) | (count == 1)))

        bucket = nearest(np.log(sizes.widths / sizes.heights), ratios, allowed)
        rows = np.flatnonzero(bucket >= 0)
        widths, heights, counts = buckets[bucket[rows]].T
        return cover(sizes, rows, self._rounded(counts, heights, widths), buckets=bucket[rows])

    def _rounded(self, frames: IntArray, *sides: npt.NDArray[Any]) -> Sizes:
        """Return frames, heights and widths that the model takes."""
        counts = (frames - 1) // self.frame_step * self.frame_step + 1
        return Sizes(
            counts, *((np.round(side / self.pixel_step) * self.pixel_step).astype(np.int64) for side in sides)
        )

    def batches(self, counts: IntArray, *, batch_size: int, num_processes: int) -> Batches:
        """Return the batches."""
        steps = counts // (batch_size * num_processes)
        number = int(steps.sum()) * num_processes
        return Batches(number, dropped=int(counts.sum()) - number * batch_size)


def _ratios(keys: Mapping[str, Any]) -> Iterable[float]:
    """Return the aspect ratios that a file asks for."""
    if not keys.get("enable_ar_bucket", False):
        return [1.0]
    if keys.get("ar_buckets"):
        return [ratio[0] / ratio[1] if isinstance(ratio, list) else ratio for ratio in keys["ar_buckets"]]
    return np.geomspace(keys["min_ar"], keys["max_ar"], keys["num_ar_buckets"])


def _sorted(values: Iterable[float]) -> tuple[float, ...]:
    """Return distinct values, rising, rounded to three digits."""
    return tuple(sorted({float(round(value, 3)) for value in values}))
