"""Sizes of samples, their grid of latents and tokens, and cover-resize with crop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import BucketingError
from .arrays import IntArray

RoundMode = Literal["up", "down", "nearest"]
IntOrArray = TypeVar("IntOrArray", int, IntArray)


class Size(NamedTuple):
    """Size of a sample: a video, or an image, which is a video of one frame.

    Args:
        frames (`int`): Number of frames, at least 1.
        height (`int`): Height in pixels, at least 1.
        width (`int`): Width in pixels, at least 1.

    Example:
        >>> Size(frames=81, height=480, width=832).pixels
        32348160
    """

    frames: int
    height: int
    width: int

    @property
    def pixels(self) -> int:
        """Number of pixels over all frames."""
        return self.frames * self.height * self.width

    @property
    def aspect_ratio(self) -> float:
        """Width divided by height."""
        return self.width / self.height

    def __str__(self) -> str:
        return f"{self.frames}×{self.height}×{self.width} (frames×height×width)"


def round_to_multiple(value: IntOrArray, multiple: int, *, mode: RoundMode = "up") -> IntOrArray:
    """Round to a multiple of `multiple`, never below one multiple, in exact integers.

    Args:
        value (`int` or array of `int`): Value to round, at least 1.
        multiple (`int`): Unit to round to, at least 1.
        mode (`"up"`, `"down"` or `"nearest"`): Halves go up in `"nearest"`.

    Returns:
        `int` or array: Same shape as `value`.

    Raises:
        BucketingError: On an unknown mode.

    Example:
        >>> [round_to_multiple(v, 16, mode="nearest") for v in (3, 23, 24)]
        [16, 16, 32]
    """
    offsets = {"up": multiple - 1, "down": 0, "nearest": multiple // 2}
    if mode not in offsets:
        raise BucketingError(f"Unknown rounding mode {mode!r}; use one of {', '.join(map(repr, offsets))}.")
    rounded = (value + offsets[mode]) // multiple * multiple
    if isinstance(rounded, np.ndarray):
        return np.maximum(rounded, multiple)
    return max(rounded, multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Strides of a VAE and patch of a transformer: how a size in pixels becomes a grid of tokens.

    Args:
        temporal_stride (`int`): Frames per latent frame after the first; 1 for image VAEs. A causal video VAE encodes
            the first frame alone, so valid frame counts are `k * temporal_stride + 1`.
        spatial_stride (`int`): Pixels per latent pixel, along height and width.
        patch (`tuple[int, int, int]`): Latent frames, rows and columns per token.
        repeats_first (`bool`): Whether the first latent frame is repeated until it fills a patch, as in CogVideoX 1.5:
            valid frame counts are then `k * temporal_stride * patch[0] + 1`, images included.
        chunk_frames (`int`): Frames of the chunks in which a VAE encodes videos, each chunk as a video of its own, and
            the last one shorter: valid frame counts are then 1 and `k * chunk_frames + temporal_stride + 1`, as for
            MiniMax-H3. 0 for VAEs that encode a video as a whole.

    Raises:
        BucketingError: If a stride or a patch side is below 1, or a chunk is no valid video.

    Example:
        >>> wan = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
        >>> wan.grid(Size(81, 480, 832)), wan.num_tokens(Size(81, 480, 832))
        ((21, 30, 52), 32760)
        >>> pairs = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(2, 2, 2), repeats_first=True)
        >>> pairs.latent_size(Size(81, 480, 832)), pairs.grid(Size(81, 480, 832))
        ((22, 60, 104), (11, 30, 52))
        >>> chunks = LatentSpec(temporal_stride=4, spatial_stride=16, patch=(1, 2, 2), chunk_frames=17)
        >>> [chunks.latent_size(Size(frames, 768, 1344))[0] for frames in (1, 5, 22, 124)]
        [1, 2, 7, 37]
    """

    temporal_stride: int
    spatial_stride: int
    patch: tuple[int, int, int] = (1, 1, 1)
    repeats_first: bool = False
    chunk_frames: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch", tuple(int(side) for side in self.patch))
        if len(self.patch) != 3 or min(self.temporal_stride, self.spatial_stride, *self.patch) < 1:
            raise BucketingError(f"Strides and the three patch sides must be at least 1, got {self}.")
        divides = self.patch[0] == 1 and self.chunk_frames % self.temporal_stride == 1 % self.temporal_stride
        if self.chunk_frames and not (divides and self.chunk_frames > self.temporal_stride + 1):
            raise BucketingError(
                f"`chunk_frames` must be k·{self.temporal_stride} + 1 with k of at least 2, and patches of one frame; "
                f"got {self.chunk_frames} and patches of {self.patch[0]}."
            )

    def __repr__(self) -> str:
        """Write the last ones only where they are set: fingerprints of prepared folders are made of this text."""
        strides = f"temporal_stride={self.temporal_stride}, spatial_stride={self.spatial_stride}"
        others = ", repeats_first=True" if self.repeats_first else ""
        others += f", chunk_frames={self.chunk_frames}" if self.chunk_frames else ""
        return f"LatentSpec({strides}, patch={self.patch}{others})"

    @property
    def num_repeats(self) -> int:
        """Latent frames that repeat the first one."""
        return self.patch[0] - 1 if self.repeats_first else 0

    @property
    def multiples(self) -> tuple[int, int]:
        """Pixels per token along height and width: valid heights and widths are multiples of them."""
        return self.spatial_stride * self.patch[1], self.spatial_stride * self.patch[2]

    def snap(self, size: Size, *, mode: RoundMode = "up", frames_mode: RoundMode = "down") -> Size:
        """Return the valid size next to `size`, never below one patch.

        Args:
            size (`Size`): Any size of at least one frame, row and column.
            mode (`"up"`, `"down"` or `"nearest"`): How height and width are rounded.
            frames_mode (same): How the number of frames is rounded; down by default, because missing frames cannot be
                made up.

        Returns:
            `Size`: A size that [`grid`][LatentSpec.grid] accepts.

        Raises:
            BucketingError: If a side is below 1, or a mode is unknown.
        """
        if min(size) < 1:
            raise BucketingError(f"Every side of a size must be at least 1, got {size}.")
        return Size(*map(int, self.snap_arrays(*map(np.int64, size), mode=mode, frames_mode=frames_mode)))

    def snap_arrays(
        self,
        frames: npt.ArrayLike,
        heights: npt.ArrayLike,
        widths: npt.ArrayLike,
        *,
        mode: RoundMode = "up",
        frames_mode: RoundMode = "down",
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return the valid sizes next to arrays of frames, heights and widths, each of shape `(n,)`; see `snap`.

        Raises:
            BucketingError: If a mode is unknown.
        """
        step_height, step_width = self.multiples
        return (
            self._snap_frames(np.asarray(frames, np.int64), mode=frames_mode),
            round_to_multiple(np.asarray(heights, np.int64), step_height, mode=mode),
            round_to_multiple(np.asarray(widths, np.int64), step_width, mode=mode),
        )

    def _snap_frames(self, frames: IntArray, *, mode: RoundMode) -> IntArray:
        if self.chunk_frames:
            shortest = self.temporal_stride + 1
            offset = self.chunk_frames - shortest
            videos = round_to_multiple(frames + offset, self.chunk_frames, mode=mode) - offset
            longest_image = {"up": 1, "nearest": shortest // 2, "down": shortest - 1}[mode]
            return np.where(frames <= longest_image, 1, videos)
        period = self.temporal_stride * self.patch[0]
        # frames = temporal_stride * (latent_frames - num_repeats - 1) + 1
        shift = self.temporal_stride * (1 + self.num_repeats) - 1
        return round_to_multiple(frames + shift, period, mode=mode) - shift

    def latent_size(self, size: Size) -> tuple[int, int, int]:
        """Return `(latent_frames, latent_height, latent_width)` of a valid size.

        Raises:
            BucketingError: If the size does not divide into whole tokens; the message names the next valid one.
        """
        if min(size) < 1 or self.snap(size) != size:
            hint = "" if min(size) < 1 else f"; the next valid size is {self.snap(size)}"
            raise BucketingError(f"Size {size} does not divide into whole tokens of {self}{hint}.")
        return self._latent(*size)

    def grid(self, size: Size) -> tuple[int, int, int]:
        """Return the token grid `(t, h, w)` of a valid size.

        Raises:
            BucketingError: If the size does not divide into whole tokens.
        """
        self.latent_size(size)
        return self.grid_of(*size)

    def grid_of(
        self, frames: IntOrArray, heights: IntOrArray, widths: IntOrArray
    ) -> tuple[IntOrArray, IntOrArray, IntOrArray]:
        """Return the token grid `(t, h, w)` of valid frames, heights and widths, unchecked; arrays of any shape."""
        t, h, w = self._latent(frames, heights, widths)
        return t // self.patch[0], h // self.patch[1], w // self.patch[2]

    def size_of(self, t: int, h: int, w: int) -> Size:
        """Return the valid size with the token grid `(t, h, w)`."""
        step_height, step_width = self.multiples
        chunks, latent_frames = self._in_chunks(t * self.patch[0] - self.num_repeats, self._chunk_latent_frames)
        frames = chunks * self.chunk_frames + (latent_frames - 1) * self.temporal_stride + 1
        return Size(frames, h * step_height, w * step_width)

    @property
    def _chunk_latent_frames(self) -> int:
        """Latent frames of a whole chunk; 0 without chunks."""
        return (self.chunk_frames - 1) // self.temporal_stride + 1 if self.chunk_frames else 0

    def _in_chunks(self, frames: IntOrArray, chunk: int) -> tuple[IntOrArray, IntOrArray]:
        """Return the whole chunks of frames, and the frames after them."""
        return (frames // chunk, frames % chunk) if chunk else (frames * 0, frames)

    def _latent(
        self, frames: IntOrArray, height: IntOrArray, width: IntOrArray
    ) -> tuple[IntOrArray, IntOrArray, IntOrArray]:
        chunks, rest = self._in_chunks(frames, self.chunk_frames)
        of_video = chunks * self._chunk_latent_frames + (rest - 1) // self.temporal_stride + 1
        return (
            of_video + self.num_repeats,
            height // self.spatial_stride,
            width // self.spatial_stride,
        )

    def num_tokens(self, size: Size) -> int:
        """Return the number of tokens of a valid size: the product of its grid.

        Raises:
            BucketingError: If the size does not divide into whole tokens.
        """
        t, h, w = self.grid(size)
        return t * h * w


class CropBox(NamedTuple):
    """The part of a resized frame that a crop keeps, in pixels."""

    top: int
    left: int
    height: int
    width: int


def cover_resize(height: int, width: int, *, target: Size) -> tuple[int, int]:
    """Return the smallest `(height, width)` of the same aspect ratio that covers the target.

    One side equals that of the target; the other is rounded to the nearest pixel and never below that of the target.

    Args:
        height (`int`): Height of the source in pixels.
        width (`int`): Width of the source in pixels.
        target (`Size`): Size whose `height` and `width` are covered.

    Raises:
        BucketingError: If a side is below 1.

    Example:
        >>> cover_resize(1080, 1920, target=Size(1, 256, 320))
        (256, 455)
    """
    if min(height, width, target.height, target.width) < 1:
        raise BucketingError(f"Sides must be at least 1, got {height}×{width} to cover {target}.")
    if target.height * width >= target.width * height:
        return target.height, (width * target.height + height // 2) // height
    return (height * target.width + width // 2) // width, target.width


def crop_box(height: int, width: int, *, target: Size, y: float = 0.5, x: float = 0.5) -> CropBox:
    """Place a box of the target's height and width inside a frame.

    Args:
        height (`int`): Height of the resized frame in pixels.
        width (`int`): Width of the resized frame in pixels.
        target (`Size`): Size whose `height` and `width` the box has.
        y (`float`): Position of the box from the top (0) to the bottom (1) of the free space; 0.5 centres it.
            A uniform draw from [0, 1) makes every position equally likely.
        x (`float`): Position of the box from the left (0) to the right (1) of the free space.

    Raises:
        BucketingError: If the box is larger than the frame or a position lies outside [0, 1].

    Example:
        >>> crop_box(256, 455, target=Size(1, 256, 320))
        CropBox(top=0, left=68, height=256, width=320)
    """
    free_height, free_width = height - target.height, width - target.width
    if free_height < 0 or free_width < 0:
        raise BucketingError(f"A frame of {height}×{width} pixels cannot be cropped to {target}; resize it first.")
    if not (0 <= y <= 1 and 0 <= x <= 1):
        raise BucketingError(f"Crop positions lie between 0 and 1, got y={y}, x={x}.")
    top, left = min(int(y * (free_height + 1)), free_height), min(int(x * (free_width + 1)), free_width)
    return CropBox(top, left, target.height, target.width)
