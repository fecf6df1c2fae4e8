"""What decodes the frames of videos: PyAV, or torchcodec where it is installed and asked for."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.video.stream import VideoStream

from ..errors import BucketingError, MediaError
from .source import MediaSource
from .video import VideoHeader, display_stamps

DecoderName = Literal["pyav", "torchcodec"]

_TOLERANCE = 0.25
"""In source frames: containers round time stamps, some to whole milliseconds."""


class StoredFrame(NamedTuple):
    """A decoded frame as the file stores it.

    Attributes:
        frame (`av.VideoFrame`): Neither turned nor stretched.
        rotation (`float`): Degrees counter-clockwise that the file asks for, as FFmpeg reads them; mirroring left out.
    """

    frame: av.VideoFrame
    rotation: float


TimedFrame = tuple[Callable[[], StoredFrame] | None, float]
"""What gives a frame, and its seconds after the first one; at last `None` and the end of the last frame."""


def check_decoder(decoder: str) -> None:
    """Raise unless `decoder` is known and can be loaded here.

    Raises:
        BucketingError: If not; the message says how to install what is missing.
    """
    if decoder not in get_args(DecoderName):
        raise BucketingError(f'`decoder` must be "pyav" or "torchcodec", got {decoder!r}.')
    if decoder == "torchcodec":
        _torchcodec()


def tolerance(stream: VideoStream) -> float:
    """Return by how many seconds a frame may come late: a quarter of a mean frame."""
    return _TOLERANCE / _rate(stream)


def timed_frames(
    source: MediaSource, container: InputContainer, stream: VideoStream, *, header: VideoHeader, decoder: DecoderName
) -> Iterator[TimedFrame]:
    """Yield the frames of a video in order of display.

    Args:
        source ([`MediaSource`]): The file.
        container (`InputContainer`): The file, opened by PyAV.
        stream (`VideoStream`): Its video.
        header ([`VideoHeader`]): What its headers say.
        decoder (`"pyav"` or `"torchcodec"`): Gives the frames; PyAV alone reads their times.

    Raises:
        MediaError: If torchcodec cannot decode the file, here or when a frame is asked for; PyAV's errors are its own.
        BucketingError: If torchcodec cannot be loaded.
    """
    if decoder == "torchcodec":
        yield from _by_torchcodec(source, container, stream, header)
    else:
        yield from _by_pyav(container, stream, header)


def _by_pyav(container: InputContainer, stream: VideoStream, header: VideoHeader) -> Iterator[TimedFrame]:
    """Decode frame after frame; streams without time stamps count them."""
    stream.thread_type = "AUTO"
    rate = _rate(stream)
    first, position, packets, second = None, 0, 0, 0.0
    for packet in container.demux(stream):
        packets += packet.size > 0
        for frame in packet.decode():
            time = frame.time if frame.time is not None else position / rate
            first = time if first is None else first
            second = time - first
            yield partial(_stored, frame), second
            position += 1
    yield None, _end(second, stream, header, packets=packets)


def _stored(frame: av.VideoFrame) -> StoredFrame:
    return StoredFrame(frame, frame.rotation)


def _by_torchcodec(
    source: MediaSource, container: InputContainer, stream: VideoStream, header: VideoHeader
) -> Iterator[TimedFrame]:
    """Decode only the frames that are asked for, by their position among the packets' times.

    torchcodec could be asked for times, but ends a frame after its duration, which is too short where the frame rate
    varies, and then gives the next one.
    """
    library = _torchcodec()
    stamps = sorted(display_stamps(container, stream))
    if not stamps or not stream.time_base:
        raise MediaError(
            f"{source.path} has no time stamps, by which torchcodec finds frames; decode it with PyAV "
            '(`decoder="pyav"`), or write the file again.'
        )
    try:
        video = library.decoders.VideoDecoder(
            os.path.abspath(source.path) if source.data is None else source.data,
            stream_index=stream.index,
            dimension_order="NHWC",
            num_ffmpeg_threads=0,
            device="cpu",
        )
    except (RuntimeError, ValueError) as error:
        raise undecodable(source, error) from error
    pictures = _Pictures(source, video)
    times = [float(stamp * stream.time_base) for stamp in stamps]
    for position, time in enumerate(times):
        yield partial(pictures.read, position, time, unit=float(stream.time_base)), time - times[0]
    yield None, _end(times[-1] - times[0], stream, header, packets=len(times))


class _Pictures:
    """Frames of torchcodec, turned back to how they are stored; one that is read twice is decoded once."""

    def __init__(self, source: MediaSource, video: Any) -> None:
        self.source, self.video = source, video
        self.rotation = float(video.metadata.rotation or 0)
        self.last: tuple[int, npt.NDArray[np.uint8]] | None = None

    def read(self, position: int, time: float, *, unit: float) -> StoredFrame:
        """Decode the frame at a position, whose time in seconds, rounded to the stream's time unit, is known."""
        if self.last is None or self.last[0] != position:
            try:
                frame = self.video.get_frame_at(position)
            except (RuntimeError, IndexError) as error:
                raise undecodable(self.source, error) from error
            if abs(frame.pts_seconds - time) > unit / 2:
                raise MediaError(
                    f"torchcodec finds the frame at {frame.pts_seconds:.3f} s of {self.source.path} instead of the "
                    f'one at {time:.3f} s; decode the file with PyAV (`decoder="pyav"`), or write it again as mp4.'
                )
            quarters = round(self.rotation / 90)
            self.last = position, np.ascontiguousarray(np.rot90(frame.data.numpy(), -quarters))
        return StoredFrame(av.VideoFrame.from_ndarray(self.last[1], format="rgb24"), self.rotation)


def undecodable(source: MediaSource, error: Exception) -> MediaError:
    """Return the error that names a file which a decoder refused, and says what to do."""
    reason = str(error).partition("\n")[0]
    return MediaError(f"{source.path} cannot be decoded ({reason}); it may be corrupt. Remove the row.")


def _end(second: float, stream: VideoStream, header: VideoHeader, *, packets: int) -> float:
    """Return when the last frame, shown from `second` on, is no longer shown.

    Where no packet is missing, that is the end of the file, which is long in some of variable frame rate.
    """
    end = second + 2 * tolerance(stream)
    return max(end, header.seconds - tolerance(stream)) if packets >= header.num_frames else end


def _rate(stream: VideoStream) -> float:
    return float(stream.average_rate or stream.guessed_rate or 1)


def _torchcodec() -> ModuleType:
    """Import torchcodec; its newer releases can be imported without FFmpeg, and then name no version of it."""
    try:
        library = importlib.import_module("torchcodec")
        if library.ffmpeg_major_version is None:
            raise ImportError("it finds no FFmpeg")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise BucketingError(
            f'`decoder="torchcodec"` cannot be loaded ({reason}). Install a release that fits your torch and device, '
            'pip install "hf_bucketing[torchcodec]", and the shared libraries of FFmpeg, for example apt-get install '
            'ffmpeg; or decode with PyAV (`decoder="pyav"`).'
        ) from error
    return library
