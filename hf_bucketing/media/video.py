"""Read what the headers of a video say: its size as shown, frames and frame rate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream

from ..errors import MediaError
from .containers import ContainerName, Turn, container_of, read_turn
from .source import MediaSource

MAX_PIXELS = 2**28
"""Per frame, as much as FFmpeg decodes."""

# av.open decodes frames to learn what headers leave out: 100 ms for an H.264 file of 1080p. These options make it
# read the headers of H.264 and HEVC frames, whose pixels are more than allowed, and open no other decoder. Without a
# container that names its streams first (the two of `container_of` do), PyAV before 17 crashes when given options.
_HEADERS_ONLY = {"codec_whitelist": "h264,hevc", "max_pixels": "1"}
_NO_ESTIMATE = {**_HEADERS_ONLY, "analyzeduration": "1"}
_ATTEMPTS: dict[ContainerName | None, tuple[dict[str, str], ...]] = {
    "mov": (_NO_ESTIMATE, _HEADERS_ONLY, {}),
    "matroska": (_HEADERS_ONLY, {}),
    None: ({},),
}
_HEADERS_SUFFICE = {"h264", "hevc", "vp8", "vp9", "av1", "libdav1d"}
"""Decoders of the codecs whose size and sample aspect ratio are known under `_HEADERS_ONLY`."""

_TITLES: dict[str, Any] = {"metadata_errors": "replace"} if hasattr(InputContainer, "metadata_errors") else {}
"""Makes titles and comments that are not UTF-8 no error, as they never are in PyAV from 19 on."""

_MAX_REORDERED = 17
"""The first frame shown is among so many packets: H.264 and HEVC put at most 16 frames before it."""


class VideoHeader(NamedTuple):
    """What the headers of a video say.

    Attributes:
        size (`tuple[int, int]`): Width and height in pixels, as shown.
        num_frames (`int`): At least 1.
        fps (`float`): Mean frames per second.
        estimated (`bool`): Whether the number of frames follows from the duration.
        seconds (`float`): From the first frame to the end of the last one; 0.0 where it is not known for sure.
        stretched (`tuple[int, int]`): Width and height of a frame with square pixels, before it is turned.
        turn ([`Turn`]): What then makes it upright.
    """

    size: tuple[int, int]
    num_frames: int
    fps: float
    estimated: bool
    seconds: float
    stretched: tuple[int, int]
    turn: Turn


class _Count(NamedTuple):
    num_frames: int
    fps: float
    estimated: bool
    seconds: float


def read_video_header(source: MediaSource, *, exact: bool = False, max_pixels: int = MAX_PIXELS) -> VideoHeader:
    """Read a video's headers; no frame is decoded, unless FFmpeg needs some for a rare codec or container.

    Args:
        source ([`MediaSource`]): The file.
        exact (`bool`): Whether to count the packets, which reads the whole file.
        max_pixels (`int`): Largest frame.

    Raises:
        MediaError: If the file is no video, has only sound, larger frames, or no number of frames.
    """
    try:
        with source.open_binary() as file:
            name = container_of(file.read(12))
            with _open_headers(source, name) as container:
                stream = _usable_stream(source, container)
                stretched = _stretched(stream)
                check_pixels(source, max(stream.width, stretched[0]), stream.height, max_pixels=max_pixels)
                position = container.streams.video.index(stream)
                turn = read_turn(file, name, track_id=stream.id, position=position)
                count = _count_packets(container, stream) if exact else _read_count(container, stream, name)
    except (av.error.FFmpegError, EOFError) as error:
        raise MediaError(
            f"{source.path} is neither an image nor a video that can be opened ({error}); it may be corrupt or cut "
            "off. Remove the row or write the file again."
        ) from error
    if not (0 < count.num_frames < 2**31 and count.fps > 0):
        raise MediaError(
            f"{source.path} names no usable video: {count.num_frames} frames at {count.fps} fps.",
            advice=["write the file again with ffmpeg", "count its packets with `exact=True`", "remove the row"],
        )
    return VideoHeader(stretched[::-1] if turn.transposed else stretched, *count, stretched, turn)


def check_pixels(source: MediaSource, width: int, height: int, *, max_pixels: int) -> None:
    """Refuse a frame before anything is allocated for it.

    Raises:
        MediaError: If `width` × `height` is more than `max_pixels`.
    """
    if width * height > max_pixels:
        raise MediaError(
            f"{source.path} claims {width}×{height} pixels, more than `max_pixels={max_pixels}`; remove the row."
        )


def open_video(
    source: MediaSource, *, name: ContainerName | None = None, options: dict[str, str] | None = None
) -> InputContainer:
    """Open with PyAV; titles and comments need not be UTF-8."""
    return av.open(source.open(), "r", format=name, options=options, **_TITLES)


def video_stream(container: InputContainer) -> VideoStream | None:
    """Return the first video stream that is no cover picture of a sound file."""
    streams = (stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic)
    return next(streams, None)


def _usable_stream(source: MediaSource, container: InputContainer) -> VideoStream:
    stream = video_stream(container)
    if stream is None:
        raise MediaError(f"{source.path} holds no video stream; remove the row.")
    if stream.codec_context is None or min(stream.width, stream.height) < 1:
        raise MediaError(f"{source.path} names no codec and size that FFmpeg knows; write the file again with ffmpeg.")
    return stream


def _open_headers(source: MediaSource, name: ContainerName | None) -> InputContainer:
    """Open with as little reading and decoding as gives what is needed."""
    for options in _ATTEMPTS[name]:
        container = open_video(source, name=name, options=options)
        stream = video_stream(container)
        if not options or stream is None or _suffices(stream, needs_count=options is _NO_ESTIMATE):
            break
        container.close()
    return container


def _suffices(stream: VideoStream, *, needs_count: bool) -> bool:
    codec = stream.codec_context
    known = codec is not None and codec.name in _HEADERS_SUFFICE and stream.width > 0 and stream.height > 0
    return known and _rate(stream) > 0 and (stream.frames > 0 or not needs_count)


def _stretched(stream: VideoStream) -> tuple[int, int]:
    ratio = stream.sample_aspect_ratio
    return max(1, round(stream.width * ratio)) if ratio and ratio > 0 else stream.width, stream.height


def _rate(stream: VideoStream) -> float:
    return float(stream.average_rate or stream.guessed_rate or 0)


def _read_count(container: InputContainer, stream: VideoStream, name: ContainerName | None) -> _Count:
    """Take the number of frames from the header where its duration agrees, else from the last frame's time.

    They disagree where an edit list hides frames, or a fragmented file counts its first fragment. The duration of the
    whole file will not do: it may be that of the sound. Without any other, the packets are counted.
    """
    fps = _rate(stream)
    seconds = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
    if stream.frames and (seconds <= 0 or abs(seconds * fps - stream.frames) < 0.5):
        return _Count(stream.frames, fps, False, max(seconds, 0.0))
    if name is not None:
        last = _last_time(container, stream)
        container.seek(0)
    else:
        last = seconds - 1 / fps if fps else -1.0
    if last >= 0:
        return _Count(round(last * fps) + 1, fps, True, 0.0)
    return _count_packets(container, stream)


def _last_time(container: InputContainer, stream: VideoStream) -> float:
    """Return the seconds from the first to the last frame, −1 if unknown; reads on from the last key frame."""
    if not container.duration or not stream.time_base:
        return -1.0
    start = min(islice(display_stamps(container, stream), _MAX_REORDERED), default=0)
    container.seek(start + int(container.duration / av.time_base / stream.time_base), stream=stream)
    end = max(display_stamps(container, stream), default=start - 1)
    return float((end - start) * stream.time_base) if end >= start else -1.0


def display_stamps(container: InputContainer, stream: VideoStream) -> Iterator[int]:
    """Yield the display times of packets, in order of decoding; edit lists hide those that are discarded."""
    for packet in container.demux(stream):
        if packet.size and packet.pts is not None and not packet.is_discard:
            yield packet.pts


def _count_packets(container: InputContainer, stream: VideoStream) -> _Count:
    """Count the packets that are shown; the frame rate is theirs where the header's is wrong for them."""
    fps = _rate(stream)
    stamps = [packet.pts for packet in container.demux(stream) if packet.size and not packet.is_discard]
    count = len(stamps)
    times = [stamp for stamp in stamps if stamp is not None]
    last = float((max(times) - min(times)) * stream.time_base) if times and stream.time_base else 0.0
    if last > 0 and abs(last * fps - (count - 1)) > 0.25:
        fps = (count - 1) / last
    return _Count(count, fps, False, last)
