"""Read size, frames and fps from the headers of image and video files, without decoding a frame."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .images import open_image, upright_size
from .source import MediaSource
from .video import MAX_PIXELS, check_pixels, read_video_header


class MediaInfo(NamedTuple):
    """What a file's header says.

    Attributes:
        width (`int`): In pixels, as shown.
        height (`int`): In pixels, as shown.
        num_frames (`int`): 1 for an image.
        fps (`float`): Frames per second, their mean where it varies; 0.0 for an image.
        num_frames_estimated (`bool`): Whether no header counts the frames, so that they follow from the duration.
    """

    width: int
    height: int
    num_frames: int
    fps: float
    num_frames_estimated: bool = False


def probe(source: MediaSource, *, exact: bool = False, max_pixels: int = MAX_PIXELS) -> MediaInfo:
    """Read the header of an image (with Pillow) or a video (with PyAV).

    Sizes are those of the frames that `iter_frames` yields: EXIF orientation and display rotation are applied, and
    pixels that are not square are stretched along the width.

    Args:
        source ([`MediaSource`]): The file.
        exact (`bool`): Whether to count the packets of a video instead of believing its header, which reads the
            whole file.
        max_pixels (`int`): Largest frame. Pillow has a limit of its own, twice `PIL.Image.MAX_IMAGE_PIXELS`.

    Raises:
        MediaError: If the file is neither, is broken, has only sound, claims larger frames, or names no number of
            frames.
    """
    with open_image(source) as image:
        if image is not None:
            width, height = upright_size(image)
            check_pixels(source, width, height, max_pixels=max_pixels)
            return MediaInfo(width, height, 1, 0.0)
    header = read_video_header(source, exact=exact, max_pixels=max_pixels)
    return MediaInfo(*header.size, header.num_frames, header.fps, header.estimated)


def frames_at_fps(
    num_frames: npt.ArrayLike, fps: npt.ArrayLike, target_fps: float | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return how many frames videos have at a lower frame rate, and the rate: frames are left out, never made up.

    Args:
        num_frames (`int` array): Frames in each file.
        fps (`float` array): Frames per second of each file; 0.0 for an image.
        target_fps (`float`, *optional*): Wanted frames per second; a file of fewer keeps its own.

    Returns:
        `int64` and `float64` arrays of the shape of `num_frames`.

    Example:
        >>> frames_at_fps([48, 48, 1], [24.0, 8.0, 0.0], 16.0)
        (array([32, 48,  1]), array([16.,  8.,  0.]))
    """
    count, rate = np.asarray(num_frames, np.int64), np.asarray(fps, np.float64)
    if target_fps is None:
        return count, rate
    slower = rate > target_fps
    kept = np.floor((count - 1) * target_fps / np.where(slower, rate, 1.0) + 1e-6).astype(np.int64) + 1
    return np.where(slower, kept, count), np.where(slower, float(target_fps), rate)
