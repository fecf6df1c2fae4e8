"""Read the sound of a video's own track, as long as the frames that a sample shows, with PyAV."""

from __future__ import annotations

from collections.abc import Iterator

import av
import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer

from .probe import open_video, reading, video_stream
from .source import MediaSource

CHANNELS = 2
"""Channels of audio as it is read, left and right."""

Waveform = npt.NDArray[np.float32]
"""Sound of shape `(2, samples)`, in [−1, 1]."""

_UNREADABLE = "The sound of {path} cannot be decoded ({error}); write the file again, or remove the row."


def has_audio(source: MediaSource) -> bool:
    """Return whether a file has a track of sound, by its header.

    Raises:
        MediaError: If the file cannot be opened as a video.
    """
    with reading(source, _UNREADABLE), open_video(source.opened()) as container:
        return bool(container.streams.audio)


def read_audio(source: MediaSource, *, start: float, samples: int, rate: int) -> Waveform | None:
    """Read sound from the track of a video.

    Times count from the first frame of the video, which the sound may precede or follow. Where the track begins later
    or ends before, there is silence. One channel is repeated, and FFmpeg mixes more than two down to left and right.

    Args:
        source ([`MediaSource`]): The video.
        start (`float`): Second from which on it is read.
        samples (`int`): Samples to read, at that rate.
        rate (`int`): Samples per second, to which the sound is resampled.

    Returns:
        Array of shape `(2, samples)`, or None if the file has no track of sound.

    Raises:
        MediaError: If the track cannot be decoded.
    """
    waveform = np.zeros((CHANNELS, samples), np.float32)
    with reading(source, _UNREADABLE), open_video(source.opened()) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        origin = _first_second(container) + start
        if start:
            _seek(container, origin)
        for first, piece in _resampled(container, stream, rate):
            place = round((first - origin) * rate)
            if place >= samples:
                break
            begin, end = max(place, 0), min(place + piece.shape[1], samples)
            if begin < end:
                waveform[:, begin:end] = piece[:, begin - place : end - place]
    return waveform


_SEEK_FROM = 2.0
"""Seconds of a file before the wanted sound from which it is faster to look for a key frame."""

_BEFORE = 0.5
"""Seconds before the wanted sound from which it is decoded, as codecs need some before they are exact."""


def _seek(container: InputContainer, second: float) -> None:
    """Go to a key frame before a second, in containers whose time stamps are exact after that."""
    if second >= _SEEK_FROM and {"mp4", "matroska"} & set(container.format.name.split(",")):
        container.seek(int((second - _BEFORE) * av.time_base))


def _first_second(container: InputContainer) -> float:
    """Return the time stamp of the first frame of the video, in seconds."""
    stream = video_stream(container)
    if stream is None or stream.start_time is None or not stream.time_base:
        return 0.0
    return float(stream.start_time * stream.time_base)


def _resampled(container: InputContainer, stream: AudioStream, rate: int) -> Iterator[tuple[float, Waveform]]:
    """Yield pieces of sound of two channels, each with the time stamp of its first sample, in seconds."""
    resampler = AudioResampler(format="fltp", layout="stereo" if stream.channels > CHANNELS else None, rate=rate)

    def pieces() -> Iterator[AudioFrame]:
        for frame in container.decode(stream):
            yield from resampler.resample(frame)
        yield from resampler.resample(None)

    for piece in pieces():
        samples = piece.to_ndarray()
        yield float(piece.time or 0.0), np.repeat(samples, CHANNELS // len(samples), axis=0)
