"""musubi-tuner's buckets and clips."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from ...buckets.arrays import IntArray
from ...buckets.sizes import LatentSpec
from ...buckets.table import BucketTable
from ...errors import BucketingError
from ...settings import check_at_least, check_types, plain_number
from ..measure import Sizes, largest_areas
from .views import Batches, Taken, Views, count_skipped, cover, join, nearest

_STEP, _FRAMES = 16, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """One of musubi-tuner's `[[datasets]]`.

    Args:
        resolution (`tuple[int, int]`): Width and height whose product is the area of the buckets.
        enable_bucket (`bool`): Whether images have buckets; videos always have.
        bucket_no_upscale (`bool`): Whether images of at most that area keep their size; videos never do.
        target_frames (`tuple` of `int`): Frames of the clips of a video.
        frame_extraction (`str`): Way of taking clips: `head`, `chunk`, `slide`, `uniform` or `full`.
        frame_stride (`int`): Frames between the starts of clips, for `slide`.
        frame_sample (`int`): Clips of a video, for `uniform`.
        max_frames (`int`): Most frames of a clip, for `full`.
    """

    resolution: tuple[int, int] = (960, 544)
    enable_bucket: bool = True
    bucket_no_upscale: bool = False
    target_frames: tuple[int, ...] = (1,)
    frame_extraction: Literal["head", "chunk", "slide", "uniform", "full"] = "head"
    frame_stride: int = 1
    frame_sample: int = 1
    max_frames: int = 129

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(1, self, "frame_stride", "frame_sample", "max_frames")
        for name in ("resolution", "target_frames"):
            numbers = tuple(plain_number(value, name, integer=True) for value in getattr(self, name))
            if min(numbers, default=0) < 1 or (name == "resolution" and len(numbers) != 2):
                raise BucketingError(f"`{name}` must hold whole numbers of at least 1, got {numbers}.")
            object.__setattr__(self, name, numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MusubiTuner:
    """musubi-tuner: images and videos in datasets of their own.

    Buckets have sides in steps of 16 around one area, and a row takes that of the nearest width ÷ height, however
    much it enlarges. A video gives a clip of each of `target_frames` that it has (`head`), or several. A batch holds
    samples of one size; the last one is short, and accelerate repeats batches until all processes have equally many.

    `enable_bucket` is on, as in all examples of its documentation, though the code's default is off.

    Source: kohya-ss/musubi-tuner 30c658c4, src/musubi_tuner/dataset/bucket.py, image_video_dataset.py, media_utils.py
    and config_utils.py.

    Args:
        images ([`Folder`], *optional*): Settings of images, None if images are not trained.
        videos ([`Folder`], *optional*): Settings of videos, None if videos are not trained.
    """

    images: Folder | None
    videos: Folder | None

    @classmethod
    def like(cls, table: BucketTable, spec: LatentSpec) -> MusubiTuner:
        """Return the rule for a square of the largest area of a table, and clips of its numbers of frames."""
        areas = largest_areas(table.sizes)
        side = math.isqrt(max(areas.values()))
        frames = tuple(count for count in areas if count > 1)
        images = Folder(resolution=(side, side))
        return cls(images=images, videos=replace(images, target_frames=frames) if frames else None)

    @classmethod
    def read(cls, tables: Sequence[Mapping[str, Any]], table: BucketTable, spec: LatentSpec) -> MusubiTuner:
        """Return the rule with the settings of a file, the keys of each source with those around them.

        Raises:
            BucketingError: If sources of images, or of videos, differ in a setting: rows do not say which is theirs.
        """
        names = {field.name for field in fields(Folder)}
        folders: dict[str, set[Folder]] = {"images": set(), "videos": set()}
        for source in tables:
            values = {name: value for name, value in source.items() if name in names}
            if isinstance(side := values.get("resolution"), int):
                values["resolution"] = (side, side)
            kind = "videos" if {"video_directory", "video_jsonl_file"} & source.keys() else "images"
            folders[kind].add(Folder(**{"enable_bucket": False, **values}))
        if max(map(len, folders.values())) > 1:
            raise BucketingError(
                "Its sources of images, or of videos, differ in settings, and rows do not say which source is theirs; "
                "write a file for each and compare one after another."
            )
        return cls(**{kind: next(iter(settings), None) for kind, settings in folders.items()})

    def views(self, sizes: Sizes) -> Taken:
        """Return the views of images and of the clips of videos."""
        images, videos = sizes.frames == 1, sizes.frames > 1
        parts = []
        if self.images is not None:
            rows = np.flatnonzero(images)
            parts.append(_views(sizes, rows, sizes.frames[rows], self.images))
        if self.videos is not None:
            folder = replace(self.videos, enable_bucket=True, bucket_no_upscale=False)
            parts += _clips(sizes, np.flatnonzero(videos), folder)
        views = join(parts)
        used = np.isin(np.arange(len(images)), views.rows)
        return Taken(
            views,
            count_skipped(
                images_without_a_dataset=images & ~used & (self.images is None),
                videos_without_a_dataset=videos & ~used & (self.videos is None),
                fewer_frames_than_target_frames=videos & ~used & (self.videos is not None),
                smaller_than_16_pixels=images & ~used & (self.images is not None),
            ),
        )

    def batches(self, counts: IntArray, *, batch_size: int, num_processes: int) -> Batches:
        """Return the batches; those that accelerate repeats are counted as full."""
        number = int(np.ceil(counts / batch_size).sum())
        again = -number % num_processes
        return Batches(number + again, dropped=0, repeated=again * batch_size)


def _views(sizes: Sizes, rows: IntArray, frames: IntArray, folder: Folder, **clips: IntArray) -> Views:
    """Return views of the given frames in the buckets of a dataset."""
    _, heights, widths = sizes.select(rows)
    bucket_widths, bucket_heights = _buckets(folder)
    bucket = nearest(widths / heights, bucket_widths / bucket_heights)
    targets = Sizes(frames, bucket_heights[bucket], bucket_widths[bucket])
    if folder.enable_bucket and folder.bucket_no_upscale:
        small = widths * heights <= math.prod(folder.resolution)
        unscaled = Sizes(frames, heights // _STEP * _STEP, widths // _STEP * _STEP)
        targets = Sizes(*(np.where(small, *pair) for pair in zip(unscaled, targets, strict=True)))
    kept = np.flatnonzero(np.minimum(targets.heights, targets.widths) > 0)
    return cover(
        sizes,
        rows[kept],
        targets.select(kept),
        rounding=lambda side: np.floor(side + 0.5),
        **{name: values[kept] for name, values in clips.items()},
    )


def _buckets(folder: Folder) -> tuple[IntArray, IntArray]:
    """Return the widths and heights of the buckets, by rising width, then height."""
    if not folder.enable_bucket:
        return np.array(folder.resolution[:1]), np.array(folder.resolution[1:])
    area = math.prod(folder.resolution)
    side = int(math.sqrt(area))
    widths = range(max(side // 2 // _STEP, 1) * _STEP, side + _STEP, _STEP)
    pairs = [(width, area // width // _STEP * _STEP) for width in widths]
    sizes = np.array(sorted({*pairs, *(pair[::-1] for pair in pairs)}))
    return sizes[:, 0], sizes[:, 1]


def _clips(sizes: Sizes, rows: IntArray, folder: Folder) -> list[Views]:
    """Return views of the clips of videos, those of each number of frames."""
    frames = sizes.frames[rows]
    if folder.frame_extraction == "full":
        count = (np.minimum(frames, folder.max_frames) - 1) // _FRAMES * _FRAMES + 1
        return [_views(sizes, rows, count, folder)]
    parts = []
    for target in sorted({(count - 1) // _FRAMES * _FRAMES + 1 for count in folder.target_frames}):
        enough = frames >= target
        clips, used = _count_clips(frames[enough], target, folder)
        full = np.full(len(clips), target)
        parts.append(_views(sizes, rows[enough], full, folder, clips=clips, used_frames=used))
    return parts


def _count_clips(frames: IntArray, target: int, folder: Folder) -> tuple[IntArray, IntArray]:
    """Return how many clips of `target` frames are taken of videos, and how many of their frames these cover."""
    if folder.frame_extraction == "slide":
        clips = (frames - target) // folder.frame_stride + 1
        return clips, target + (clips - 1) * min(folder.frame_stride, target)
    if folder.frame_extraction == "chunk":
        clips = frames // target
    else:
        clips = np.full(len(frames), folder.frame_sample if folder.frame_extraction == "uniform" else 1)
    return clips, np.minimum(clips * target, frames)
