"""Write frames as an H.264 mp4 file, with sound or without, or one as an image."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

from ..errors import MediaError
from ..files import complete_file


class Sound(NamedTuple):
    """Sound of a video.

    Attributes:
        samples (array of `float`, shape `(channels, n)`): One or two channels, in [−1, 1].
        rate (`int`): Samples per second.
    """

    samples: npt.NDArray[np.floating[Any]]
    rate: int


def write_video(
    path: str | os.PathLike[str],
    frames: Iterable[npt.NDArray[np.uint8]],
    *,
    fps: float,
    sound: Sound | None = None,
) -> None:
    """Encode RGB frames with H.264, and sound with AAC; the file gets its name only when it is complete.

    Args:
        path (path): File to write, ending in `.mp4`.
        frames (iterable of `uint8` arrays of shape `(height, width, 3)`): One or more frames of one size with even
            sides.
        fps (`float`): Frames per second.
        sound ([`Sound`], *optional*): Sound from the first frame on; by default the file has no track of sound.

    Raises:
        MediaError: If there is no frame or a side is odd, which H.264 cannot store.
    """
    path = Path(path)
    frames = iter(frames)
    first = next(frames, None)
    if first is None or first.shape[0] % 2 or first.shape[1] % 2:
        raise MediaError(
            f"{path} needs frames of even height and width, got {None if first is None else first.shape}."
        )
    with complete_file(path) as partial, av.open(str(partial), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = first.shape[:2]
        stream.pix_fmt = "yuv420p"
        track = None if sound is None else container.add_stream("aac", rate=sound.rate, layout=_layout(sound))
        for frame in (first, *frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
        if sound is not None and track is not None:
            samples = np.ascontiguousarray(sound.samples, np.float32)
            sound_frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=_layout(sound))
            sound_frame.sample_rate, sound_frame.pts = sound.rate, 0
            container.mux(track.encode(sound_frame))
            container.mux(track.encode())


def _layout(sound: Sound) -> str:
    return "mono" if len(sound.samples) == 1 else "stereo"


def write_image(path: str | os.PathLike[str], frame: npt.NDArray[np.uint8]) -> None:
    """Write an RGB frame `(height, width, 3)` as png; the file gets its name only when it is complete."""
    with complete_file(Path(path)) as partial:
        Image.fromarray(frame).save(partial, format="png")
