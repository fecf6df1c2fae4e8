"""Small copies of images and videos as data URIs, for pages that hold everything themselves."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image

from .decode import Frame, frame_times, iter_frames
from .probe import probe
from .source import MediaSource

_MOST_FRAMES = 24
_QUALITY = 72


class Thumbnail(NamedTuple):
    """A small picture: its data as a URI, width and height in pixels."""

    uri: str
    width: int
    height: int


def thumbnail(source: MediaSource, *, second: float = 0.0, max_side: int = 240) -> Thumbnail:
    """Return the frame on display at a time as a JPEG.

    Args:
        source ([`MediaSource`]): Image or video.
        second (`float`): Time of the frame; 0 for an image.
        max_side (`int`): Longest side of the picture in pixels; a smaller one is kept.

    Raises:
        MediaError: If the file cannot be decoded.
    """
    (frame,) = iter_frames(source, [second])
    return _encode([_small(frame, max_side)], form="jpeg", quality=_QUALITY)


def animation(source: MediaSource) -> Thumbnail:
    """Return a video as [`animated`] does, with at most 24 frames; an image as one frame.

    Raises:
        MediaError: If the file cannot be decoded.
    """
    info = probe(source)
    count = min(info.num_frames, _MOST_FRAMES) if info.fps else 1
    fps = info.fps * count / info.num_frames if info.fps else 0.0
    return animated([*iter_frames(source, frame_times(count, fps))], fps=fps)


def animated(
    frames: Sequence[Frame], *, fps: float, most_frames: int = _MOST_FRAMES, max_side: int = 240
) -> Thumbnail:
    """Return frames as an animated WebP that plays as long as they do.

    Args:
        frames (sequence of arrays of `uint8`, shape `(height, width, 3)`): The frames, at least one.
        fps (`float`): Their frame rate; 0 for an image.
        most_frames (`int`): Frames of the picture at most, evenly spread.
        max_side (`int`): Longest side of the picture in pixels; smaller frames are kept.
    """
    count = min(len(frames), most_frames)
    small = [_small(frames[number * len(frames) // count], max_side) for number in range(count)]
    duration = round(1000 * len(frames) / count / fps) if fps else 0
    return _encode(
        small, form="webp", quality=_QUALITY, save_all=True, append_images=small[1:], duration=duration, loop=0
    )


def _small(frame: Frame, max_side: int) -> Image.Image:
    image = Image.fromarray(frame)
    image.thumbnail((max_side, max_side))
    return image


def _encode(frames: Sequence[Image.Image], *, form: str, **options: object) -> Thumbnail:
    data = io.BytesIO()
    frames[0].save(data, form, **options)
    uri = f"data:image/{form};base64,{base64.b64encode(data.getvalue()).decode()}"
    return Thumbnail(uri, *frames[0].size)
