"""Small copies of images and videos, for pages: as they are, or as a sample shows them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image

from ..conditions.names import FACE, MASK, MOVING, REFERENCE
from .decode import Frame, iter_frames
from .images import cropped_part, is_image
from .probe import probe
from .rows import FileSample
from .source import MediaSource
from .views import frame_times

_MOST_FRAMES = 24
_QUALITY = 72
_GAP = 4
"""Pixels between frames that lie side by side."""


class Thumbnail(NamedTuple):
    """A small picture: its file's contents and format, width and height in pixels."""

    data: bytes
    form: str
    width: int
    height: int

    @property
    def uri(self) -> str:
        """The picture as a data URI, for pages that hold everything themselves."""
        return f"data:image/{self.form};base64,{base64.b64encode(self.data).decode()}"


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


def sample_thumbnails(sample: FileSample, *, max_side: int = 200) -> dict[str, Thumbnail]:
    """Return JPEGs of what a model is shown of a sample, by what they are: of its frames, conditions and references.

    Of a video they are the first, middle and last frame that its view picks, side by side. All have the crop of the
    sample, but references that do not lie over it, which are shown whole.

    Args:
        sample ([`FileSample`]): The sample.
        max_side (`int`): Longest side of a frame in pixels.

    Raises:
        MediaError: If a file cannot be decoded, or is not as its row says.
    """
    view = sample.view
    places = sorted({0, view.size.frames // 2, view.size.frames - 1})
    times = [view.times[place] for place in places]
    decoder, background = view.video_decoder, view.background
    frames = [*iter_frames(sample.source, times, video_decoder=decoder, row=sample.row, background=background)]
    scale = min(1.0, max_side / max(view.size[1:]))
    size = round(view.size.height * scale), round(view.size.width * scale)

    def cropped(frames: Sequence[Frame]) -> Thumbnail:
        strip = Image.new("RGB", (len(frames) * (size[1] + _GAP) - _GAP, size[0]), "grey")
        for place, frame in enumerate(frames):
            part = cropped_part(frame, size, *view.crop(*frame.shape[:2]))
            strip.paste(Image.fromarray(part), (place * (size[1] + _GAP), 0))
        return _encode([strip], form="jpeg", quality=_QUALITY)

    pictures = {"first, middle and last frame" if len(frames) > 1 else "image": cropped(frames)}
    for name, file in sample.conditions.items():
        sources = file if isinstance(file, tuple) else () if file is None else (file,)
        for number, source in enumerate(sources, start=1):
            source = source.opened()
            moving = name in MOVING and not is_image(source)
            (frame,) = iter_frames(
                source,
                times[:1] if moving else [0.0],
                video_decoder=decoder,
                background=None if name == MASK else background,
            )
            label = f"{name} {number}" if name == REFERENCE else name
            keeps_shape = name == FACE or (name == REFERENCE and not sample.references.lie_over)
            pictures[label] = (
                _encode([_small(frame, max_side)], form="jpeg", quality=_QUALITY) if keeps_shape else cropped([frame])
            )
    return pictures


def animation(source: MediaSource, *, max_side: int = 240) -> Thumbnail:
    """Return a video as [`animated`] does, with at most 24 frames; an image as one frame.

    Args:
        source ([`MediaSource`]): Image or video.
        max_side (`int`): Longest side of the picture in pixels; smaller frames are kept.

    Raises:
        MediaError: If the file cannot be decoded.
    """
    info = probe(source)
    count = min(info.num_frames, _MOST_FRAMES) if info.fps else 1
    fps = info.fps * count / info.num_frames if info.fps else 0.0
    return animated([*iter_frames(source, frame_times(count, fps))], fps=fps, max_side=max_side)


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
    return Thumbnail(data.getvalue(), form, *frames[0].size)
