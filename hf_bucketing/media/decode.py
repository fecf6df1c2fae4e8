"""Decode the frames of a file that are shown at given times, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import av
import numpy as np
import numpy.typing as npt
from PIL import ImageOps

from ..errors import MediaError
from .images import exif_orientation, open_image
from .source import MediaSource
from .video import VideoHeader, open_video, read_video_header, video_stream

Frame = npt.NDArray[np.uint8]

_TOLERANCE = 0.25
"""In source frames: containers round time stamps, some to whole milliseconds."""


def frame_times(count: int, fps: float, *, start: int = 0) -> list[float]:
    """Return the times in seconds of `count` frames at `fps`, from frame `start` on; all 0.0 for an image (fps 0).

    Example:
        >>> frame_times(3, 8.0, start=4)
        [0.5, 0.625, 0.75]
    """
    return [(start + position) / fps if fps else 0.0 for position in range(count)]


def iter_frames(source: MediaSource, times: Sequence[float]) -> Iterator[Frame]:
    """Yield the frame on display at each time after the first frame.

    Args:
        source ([`MediaSource`]): An image, which shows its one frame at 0.0, or a video.
        times (sequence of `float`): Seconds, ascending.

    Yields:
        `uint8` array of shape `(height, width, 3)`, RGB, of the size that `probe` reads: EXIF orientation or display
        rotation applied, pixels square.

    Raises:
        MediaError: If the file cannot be decoded or ends before the last time.
    """
    frame = _image(source)
    if frame is None:
        yield from _iter_video(source, times)
        return
    if len(times) != 1:
        raise MediaError(f"{source.path} is an image of one frame, but {len(times)} frames were asked for.")
    yield frame


def _image(source: MediaSource) -> Frame | None:
    with open_image(source) as image:
        if image is None:
            return None
        upright = image if exif_orientation(image) == 1 else ImageOps.exif_transpose(image)
        return np.array(upright.convert("RGB"))


def _iter_video(source: MediaSource, times: Sequence[float]) -> Iterator[Frame]:
    header = read_video_header(source)
    wanted = iter(times)
    time = next(wanted, None)
    shown: av.VideoFrame | None = None
    decoded, shown_at = 0, 0.0
    try:
        with open_video(source) as container:
            stream = video_stream(container)
            assert stream is not None, "read_video_header found one"
            stream.thread_type = "AUTO"
            slack = _TOLERANCE / float(stream.average_rate or stream.guessed_rate or 1)
            for frame, second in _timed(container, stream, header):
                while time is not None and shown is not None and second > time + slack:
                    yield _upright(shown, header, source)
                    time = next(wanted, None)
                if time is None:
                    return
                if frame is not None:
                    shown, shown_at, decoded = frame, second, decoded + 1
    except (av.error.FFmpegError, IndexError, EOFError) as error:
        raise MediaError(f"{source.path} cannot be decoded ({error}); it may be corrupt. Remove the row.") from error
    if time is not None:
        raise MediaError(
            f"{source.path} ends after {decoded} frames ({shown_at:.3f} s), but its metadata promised one at "
            f"{time:.3f} s; the file may be cut off. Remove the row, or read its metadata again."
        )


def _timed(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream, header: VideoHeader
) -> Iterator[tuple[av.VideoFrame | None, float]]:
    """Yield frames with their seconds after the first one, and at last `None` with the end of the last frame.

    Streams without time stamps count frames. The last frame of a file that is not cut off stays on display to the end
    of the file, which is long in some of variable frame rate.
    """
    rate = float(stream.average_rate or stream.guessed_rate or 1)
    first, position, packets, second = None, 0, 0, 0.0
    for packet in container.demux(stream):
        packets += packet.size > 0
        for frame in packet.decode():
            time = frame.time if frame.time is not None else position / rate
            first = time if first is None else first
            second = time - first
            yield frame, second
            position += 1
    end = second + 2 * _TOLERANCE / rate
    whole = packets >= header.num_frames
    yield None, max(end, header.seconds - _TOLERANCE / rate) if whole else end


def _upright(frame: av.VideoFrame, header: VideoHeader, source: MediaSource) -> Frame:
    """Turn a frame into what its file's header says is shown."""
    if round(frame.rotation / 90) % 2 != header.turn.transposed:
        raise MediaError(
            f"{source.path} turns its frames by {frame.rotation}°, which its header does not say; write the file "
            "again, for example with ffmpeg."
        )
    if (frame.width, frame.height) == header.stretched:
        pixels = frame.to_ndarray(format="rgb24")
    else:
        width, height = header.stretched
        pixels = frame.reformat(width=width, height=height, format="rgb24", interpolation="BICUBIC").to_ndarray()
    if header.turn.transposed:
        pixels = pixels.transpose(1, 0, 2)
    rows, columns = (-1 if reverse else 1 for reverse in header.turn[1:])
    return np.ascontiguousarray(pixels[::rows, ::columns], np.uint8)
