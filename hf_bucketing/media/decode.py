"""Decode the frames of a file that are shown at given times, one at a time, with PyAV or torchcodec."""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from typing import BinaryIO

import av
import numpy as np
import numpy.typing as npt
from av.codec import CodecContext
from av.container import InputContainer
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream
from PIL import ImageOps

from ..errors import BucketingError, MediaError, explains_arguments
from .colours import Colours, corrected_to_bt709, is_untagged_hd, rgb_pixels
from .images import exif_orientation, laid_on, open_image, rgb_array
from .probe import (
    MAX_REORDERED,
    PYAV_ERRORS,
    MediaInfo,
    VideoHeader,
    are_times_of_decoding,
    check_unchanged,
    frame_rate,
    next_time,
    opacity_decoder,
    open_video,
    read_video_header,
    stamps_of,
    video_stream,
)
from .source import MediaSource
from .views import WHITE, DecoderName, check_decoder, torchcodec

Frame = npt.NDArray[np.uint8]

_SEEK_FROM = 2.0
"""Seconds of a video before the first wanted frame from which it is faster to look for a key frame."""

_TOLERANCE = 0.25
"""Tolerance of frame times, in source frames: containers round time stamps, some to whole milliseconds."""


@explains_arguments()
def iter_frames(
    source: MediaSource,
    times: Sequence[float],
    *,
    video_decoder: DecoderName = "pyav",
    row: MediaInfo | None = None,
    background: str | None = WHITE,
) -> Iterator[Frame]:
    """Yield the frame on display at each time, counted from the first frame.

    Args:
        source ([`MediaSource`]): An image, which shows its one frame at 0.0, or a video.
        times (sequence of `float`): Seconds, ascending.
        video_decoder (`"pyav"` or `"torchcodec"`): Decoder of videos. torchcodec must be installed. It reads the
            packets of the whole file first and decodes from the last key frame before the frames asked for: faster
            for a few frames late in a file, slower for many. It raises for files that it cannot seek in, such as
            MPEG-TS and AVI with B-frames. The colours of the two decoders may differ by a few levels.
        row ([`MediaInfo`], *optional*): What a row of a data set says of the file, to compare with its header.
        background (`str`, *optional*): Colour on which transparent parts are laid; None for a mask, whose transparent
            parts are black, and whose shape may lie in its opacity alone, see `laid_on`.

    Yields:
        `uint8` array of shape `(height, width, 3)`, RGB of BT.709, of the size that `probe` reads: EXIF orientation or
        display rotation applied, pixels square, HDR mapped to SDR.

    Raises:
        MediaError: If the file cannot be decoded, ends before the last time, or is not as its row says.
        BucketingError: If the decoder is unknown or cannot be loaded.
    """
    check_decoder(video_decoder)
    source = source.opened()
    frame = _image(source, background)
    if frame is None:
        yield from _iter_video(source, times, video_decoder, row=row, background=background)
        return
    if row is not None:
        check_unchanged(source, MediaInfo(frame.shape[1], frame.shape[0], 1, 0.0), row=row)
    if len(times) != 1:
        raise MediaError(f"{source.path} is an image of one frame, but {len(times)} frames were asked for.")
    yield frame


def _image(source: MediaSource, background: str | None) -> Frame | None:
    with open_image(source) as image:
        if image is None:
            return None
        upright = image if exif_orientation(image) == 1 else ImageOps.exif_transpose(image)
        return rgb_array(upright, background=background)


def _iter_video(
    source: MediaSource,
    times: Sequence[float],
    video_decoder: DecoderName,
    *,
    row: MediaInfo | None,
    background: str | None,
) -> Iterator[Frame]:
    header = read_video_header(source, quick=True)
    if row is not None:
        check_unchanged(source, header.info, row=row)
    waiting = deque(times)
    decoders: list[_Decoder] = [_by_torchcodec if video_decoder == "torchcodec" else _by_pyav]
    if video_decoder == "pyav" and times and times[0] >= _SEEK_FROM:
        decoders.insert(0, partial(_by_pyav, start=times[0]))
    while waiting:
        frame_before: Callable[[], _StoredFrame] | None = None
        passed, time_before = 0, 0.0
        decoder = decoders.pop(0)
        try:
            with open_video(source) as container:
                stream = video_stream(container)
                assert stream is not None, "read_video_header found one"
                tolerance, colours = _tolerance(stream), Colours.of(stream.codec_context)
                upright = partial(_upright, header=header, colours=colours, source=source, background=background)
                for frame, second in decoder(source, container, stream, header):
                    while waiting and frame_before is not None and second > waiting[0] + tolerance:
                        yield upright(*frame_before())
                        waiting.popleft()
                    if not waiting:
                        return
                    if frame is not None:
                        frame_before, time_before, passed = frame, second, passed + 1
        except BucketingError:
            raise
        except PYAV_ERRORS as error:
            if not decoders:
                raise _undecodable(source, error) from error
        if waiting and not decoders:
            raise MediaError(
                f"{source.path} ends after {passed} frames ({time_before:.3f} s), but its metadata promised one at "
                f"{waiting[0]:.3f} s; the file may be cut off. Remove the row, or read its metadata again."
            )


_StoredFrame = tuple[av.VideoFrame, float]
"""A frame, neither rotated nor stretched, and its rotation for display in degrees counter-clockwise."""

_TimedFrame = tuple[Callable[[], _StoredFrame] | None, float]
"""A function that returns a frame, and its seconds after the first frame; last, `None` and the end of the video."""

_Decoder = Callable[[MediaSource, InputContainer, VideoStream, VideoHeader], Iterator[_TimedFrame]]


def _upright(
    frame: av.VideoFrame,
    rotation: float,
    *,
    header: VideoHeader,
    colours: Colours,
    source: MediaSource,
    background: str | None,
) -> Frame:
    """Stretch and rotate a frame as its file's header says, in RGB, and lay it on a colour where it is transparent."""
    if round(rotation / 90) % 2 != header.turn.transposed:
        raise MediaError(
            f"{source.path} turns its frames by {rotation:g}°, which its header does not say; write the file again, "
            "for example with ffmpeg."
        )
    pixels = rgb_pixels(frame, colours, size=header.stretched)
    if pixels.shape[-1] == 4:
        pixels = laid_on(pixels, background)
    if header.turn.transposed:
        pixels = pixels.transpose(1, 0, 2)
    rows, columns = (-1 if reverse else 1 for reverse in header.turn[1:])
    return np.ascontiguousarray(pixels[::rows, ::columns], np.uint8)


def _by_pyav(
    _source: MediaSource, container: InputContainer, stream: VideoStream, header: VideoHeader, *, start: float = 0.0
) -> Iterator[_TimedFrame]:
    """Decode frame after frame; without time stamps, times follow from the number of frames.

    With a `start` in seconds, decode from a key frame before it on, and yield nothing where none can be found. What
    the end of the video is then remains uncertain, as packets are not counted.
    """
    stream.thread_type = "AUTO"
    codec = stream.codec_context
    if name := opacity_decoder(stream):
        other = CodecContext.create(name, "r")
        assert isinstance(other, VideoCodecContext), "it decodes VP8 or VP9"
        other.extradata, codec = codec.extradata, other
    rate = frame_rate(stream) or 1.0
    packets = container.demux(stream)
    head = [*islice(packets, MAX_REORDERED)]
    reordered = are_times_of_decoding(container, stream, head)
    first = None
    if start:
        first = None if reordered else _seek(container, stream, start - MAX_REORDERED / rate, head=head)
        if first is None:
            return
        head, packets = [], container.demux(stream)
    number, time = 0, None

    def counted() -> Iterator[Packet]:
        nonlocal number
        for packet in chain(head, packets):
            number += packet.size > 0
            yield packet

    frames = _timed(counted(), codec, window=MAX_REORDERED if reordered else 0)
    for frame, stated in frames:
        if start and time is None and (stated is None or first is None or stated - first > start):
            return
        time = next_time(stated, time, rate=rate)
        first = time if first is None else first
        yield partial(_stored, frame), time - first
    yield None, _end((time or 0.0) - (first or 0.0), stream, header, packets=number)


def _timed(
    packets: Iterable[Packet], codec: VideoCodecContext, *, window: int
) -> Iterator[tuple[av.VideoFrame, float | None]]:
    """Decode packets, and yield frames with the seconds that the file states.

    Times of decoding are a permutation of those of display, over no more than a `window` of frames: in ascending order
    they are right, at any rate.
    """
    waiting: deque[av.VideoFrame] = deque()
    times: list[float] = []
    for frame in (frame for packet in packets for frame in codec.decode(packet)):
        waiting.append(frame)
        if frame.time is not None:
            heapq.heappush(times, frame.time)
        if len(waiting) > window:
            yield waiting.popleft(), heapq.heappop(times) if times else None
    for frame in waiting:
        yield frame, heapq.heappop(times) if times else None


def _seek(container: InputContainer, stream: VideoStream, second: float, *, head: Sequence[Packet]) -> float | None:
    """Go to the last key frame before a second of the video and return the time stamp of its first frame, in seconds.

    Return None for containers whose time stamps may be inexact after that. `head` are the first packets.
    """
    stamps = stamps_of(head)
    if not stamps or not stream.time_base or not {"mp4", "matroska"} & set(container.format.name.split(",")):
        return None
    first = min(stamps)
    container.seek(first + max(int(second / stream.time_base), 0), stream=stream)
    return float(first * stream.time_base)


def _stored(frame: av.VideoFrame) -> _StoredFrame:
    return frame, frame.rotation


def _by_torchcodec(
    source: MediaSource, container: InputContainer, stream: VideoStream, header: VideoHeader
) -> Iterator[_TimedFrame]:
    """Decode only the frames that are asked for, by their position among the packets' times.

    torchcodec also takes times, but treats a frame as ended after its duration, which is too short in files of
    variable frame rate, and then returns the next frame.
    """
    library = torchcodec()
    if header.may_be_transparent:
        raise MediaError(
            f"{source.path} may have transparent parts, which torchcodec leaves out; decode it with PyAV "
            '(`video_decoder="pyav"`), or write the file again without them.'
        )
    packets = [*container.demux(stream)]
    stamps = sorted(stamps_of(packets))
    if not stamps or not stream.time_base or are_times_of_decoding(container, stream, packets[:MAX_REORDERED]):
        raise MediaError(
            f"{source.path} has no times of display, by which torchcodec finds frames; decode it with PyAV "
            '(`video_decoder="pyav"`), or write the file again.'
        )
    try:
        video = library.decoders.VideoDecoder(
            _for_torchcodec(source),
            stream_index=stream.index,
            dimension_order="NHWC",
            num_ffmpeg_threads=0,
            device="cpu",
        )
    except (RuntimeError, ValueError) as error:
        raise _undecodable(source, error) from error
    rotation = float(video.metadata.rotation or 0)
    unit = float(stream.time_base)
    untagged = is_untagged_hd(stream.codec_context) and not Colours.of(stream.codec_context).mapped

    @lru_cache(maxsize=1)  # a frame that is shown at several times is decoded once
    def read(position: int, time: float) -> Frame:
        """Decode the frame at a position, rotated back to how it is stored, and check its time in seconds."""
        try:
            frame = video.get_frame_at(position)
        except (RuntimeError, IndexError) as error:
            raise _undecodable(source, error) from error
        if abs(frame.pts_seconds - time) > unit / 2:
            raise MediaError(
                f"torchcodec finds the frame at {frame.pts_seconds:.3f} s of {source.path} instead of the one at "
                f'{time:.3f} s; decode the file with PyAV (`video_decoder="pyav"`), or write it again as mp4.'
            )
        pixels = corrected_to_bt709(frame.data.numpy()) if untagged else frame.data.numpy()
        return np.ascontiguousarray(np.rot90(pixels, -round(rotation / 90)))

    def stored(position: int, time: float) -> _StoredFrame:
        return av.VideoFrame.from_ndarray(read(position, time), format="rgb24"), rotation

    times = [float(stamp * stream.time_base) for stamp in stamps]
    for position, time in enumerate(times):
        yield partial(stored, position, time), time - times[0]
    yield None, _end(times[-1] - times[0], stream, header, packets=len(times))


def _for_torchcodec(source: MediaSource) -> str | bytes | BinaryIO:
    file = source.data or source.open()
    return os.path.abspath(file) if isinstance(file, str) else file


def _undecodable(source: MediaSource, error: Exception) -> MediaError:
    reason = str(error).partition("\n")[0]
    return MediaError(f"{source.path} cannot be decoded ({reason}); it may be corrupt. Remove the row.")


def _end(second: float, stream: VideoStream, header: VideoHeader, *, packets: int) -> float:
    """Return until when the last frame, shown from `second` on, stays on display.

    If no packet is missing, that is the end of the file: some files of variable frame rate show it for long.
    """
    end = second + 2 * _tolerance(stream)
    return max(end, header.seconds - _tolerance(stream)) if packets >= header.info.num_frames else end


def _tolerance(stream: VideoStream) -> float:
    """Return by how many seconds a frame may come late: a quarter of the mean frame duration."""
    return _TOLERANCE / (frame_rate(stream) or 1.0)
