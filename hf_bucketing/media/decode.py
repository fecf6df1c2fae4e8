"""Decode the frames of a file that are shown at given times, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import VideoReformatter
from PIL import ImageOps

from ..errors import MediaError
from .decoders import DecoderName, StoredFrame, check_decoder, timed_frames, tolerance, undecodable
from .images import exif_orientation, open_image, rgb_array
from .source import MediaSource
from .video import VideoHeader, open_video, read_video_header, video_stream

Frame = npt.NDArray[np.uint8]


def frame_times(count: int, fps: float, *, start: int = 0) -> list[float]:
    """Return the times in seconds of `count` frames at `fps`, from frame `start` on; all 0.0 for an image (fps 0).

    Example:
        >>> frame_times(3, 8.0, start=4)
        [0.5, 0.625, 0.75]
    """
    return [(start + position) / fps if fps else 0.0 for position in range(count)]


def iter_frames(source: MediaSource, times: Sequence[float], *, decoder: DecoderName = "pyav") -> Iterator[Frame]:
    """Yield the frame on display at each time after the first frame.

    Args:
        source ([`MediaSource`]): An image, which shows its one frame at 0.0, or a video.
        times (sequence of `float`): Seconds, ascending.
        decoder (`"pyav"` or `"torchcodec"`): Of videos. The second must be installed. It reads the packets of the
            whole file first and decodes from the last key frame before the frames asked for: quicker for few of them
            late in a file, slower for many. What it cannot seek in, such as MPEG-TS, is an error. Colours may differ
            by some levels.

    Yields:
        `uint8` array of shape `(height, width, 3)`, RGB, of the size that `probe` reads: EXIF orientation or display
        rotation applied, pixels square.

    Raises:
        MediaError: If the file cannot be decoded or ends before the last time.
        BucketingError: If the decoder is unknown or cannot be loaded.
    """
    check_decoder(decoder)
    frame = _image(source)
    if frame is None:
        yield from _iter_video(source, times, decoder)
        return
    if len(times) != 1:
        raise MediaError(f"{source.path} is an image of one frame, but {len(times)} frames were asked for.")
    yield frame


def _image(source: MediaSource) -> Frame | None:
    with open_image(source) as image:
        if image is None:
            return None
        upright = image if exif_orientation(image) == 1 else ImageOps.exif_transpose(image)
        return rgb_array(upright)


def _iter_video(source: MediaSource, times: Sequence[float], decoder: DecoderName) -> Iterator[Frame]:
    header = read_video_header(source)
    wanted = iter(times)
    time = next(wanted, None)
    shown: Callable[[], StoredFrame] | None = None
    passed, shown_at = 0, 0.0
    try:
        with open_video(source) as container:
            stream = video_stream(container)
            assert stream is not None, "read_video_header found one"
            slack = tolerance(stream)
            for frame, second in timed_frames(source, container, stream, header=header, decoder=decoder):
                while time is not None and shown is not None and second > time + slack:
                    yield _upright(shown(), header, source)
                    time = next(wanted, None)
                if time is None:
                    return
                if frame is not None:
                    shown, shown_at, passed = frame, second, passed + 1
    except (av.error.FFmpegError, IndexError, EOFError) as error:
        raise undecodable(source, error) from error
    if time is not None:
        raise MediaError(
            f"{source.path} ends after {passed} frames ({shown_at:.3f} s), but its metadata promised one at "
            f"{time:.3f} s; the file may be cut off. Remove the row, or read its metadata again."
        )


def _upright(stored: StoredFrame, header: VideoHeader, source: MediaSource) -> Frame:
    """Turn a frame into what its file's header says is shown."""
    frame, rotation = stored
    if round(rotation / 90) % 2 != header.turn.transposed:
        raise MediaError(
            f"{source.path} turns its frames by {rotation:g}°, which its header does not say; write the file again, "
            "for example with ffmpeg."
        )
    width, height = header.stretched
    shape: dict[str, Any] = {"width": width, "height": height, "interpolation": "BICUBIC"}
    stretch = {} if (frame.width, frame.height) == header.stretched else shape
    # PyAV 19 keeps the threads of `frame.reformat` alive, which a forked process then waits for forever.
    pixels = VideoReformatter().reformat(frame, format="rgb24", **stretch).to_ndarray()
    if header.turn.transposed:
        pixels = pixels.transpose(1, 0, 2)
    rows, columns = (-1 if reverse else 1 for reverse in header.turn[1:])
    return np.ascontiguousarray(pixels[::rows, ::columns], np.uint8)
