"""Decoders of videos by their names, and the times of the frames that they are asked for."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Literal, get_args

from ..errors import BucketingError

DecoderName = Literal["pyav", "torchcodec"]


def check_decoder(video_decoder: str) -> None:
    """Raise unless `video_decoder` is known and can be loaded.

    Raises:
        BucketingError: If it is not; the message says how to install what is missing.
    """
    if video_decoder not in get_args(DecoderName):
        raise BucketingError(f'`video_decoder` must be "pyav" or "torchcodec", got {video_decoder!r}.')
    if video_decoder == "torchcodec":
        torchcodec()


def frame_times(count: int, fps: float, *, start: int = 0) -> list[float]:
    """Return the times in seconds of `count` frames at `fps`, from frame `start` on; all 0.0 for an image (fps 0).

    Example:
        >>> frame_times(3, 8.0, start=4)
        [0.5, 0.625, 0.75]
    """
    return [(start + position) / fps if fps else 0.0 for position in range(count)]


def torchcodec() -> ModuleType:
    """Import torchcodec; newer releases can be imported without FFmpeg, and then report no FFmpeg version."""
    try:
        library = importlib.import_module("torchcodec")
        if library.ffmpeg_major_version is None:
            raise ImportError("it finds no FFmpeg")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise BucketingError(
            f'`video_decoder="torchcodec"` cannot be loaded ({reason}). Install a release that fits your torch and '
            'device, pip install "hf_bucketing[torchcodec]", and the shared libraries of FFmpeg, for example apt-get '
            'install ffmpeg; or decode with PyAV (`video_decoder="pyav"`).'
        ) from error
    return library
