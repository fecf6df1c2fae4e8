"""Read size, frames and frame rate from the headers of image and video files, without decoding a frame."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
from typing import Any, BinaryIO, Literal, NamedTuple

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.stream import VideoStream

from ..errors import BucketingError, MediaError
from .colours import Colours, is_untagged_hd, with_opacity
from .containers import ContainerName, Turn, container_of, picture_changes, playlist_of, read_turn
from .images import open_image, upright_size
from .source import MediaSource

MAX_PIXELS = 2**28
"""Largest number of pixels per frame: what FFmpeg decodes at most."""

# av.open decodes frames to find what headers leave out, which takes 100 ms for an H.264 file of 1080p. With these
# options it reads only the headers of H.264 and HEVC frames (they have more pixels than allowed) and opens no other
# decoder. PyAV before 17 crashes when given options for a container that does not name its streams first; the two of
# `container_of` do.
_HEADERS_ONLY = {"codec_whitelist": "h264,hevc", "max_pixels": "1"}
_NO_ESTIMATE = {**_HEADERS_ONLY, "analyzeduration": "1"}
_ATTEMPTS: dict[ContainerName | None, tuple[dict[str, str], ...]] = {
    "mov": (_NO_ESTIMATE, _HEADERS_ONLY, {}),
    "matroska": (_HEADERS_ONLY, {}),
    None: ({},),
}
_HEADERS_SUFFICE = {"h264", "hevc", "vp8", "vp9", "av1", "libdav1d"}
"""Decoders of the codecs whose size and sample aspect ratio are known under `_HEADERS_ONLY`."""

_VIDEO_FORMATS = (
    "mov,matroska,avi,asf,asf_o,flv,live_flv,kux,mpegts,mpegtsraw,mpeg,mpegvideo,ogg,mxf,gxf,nut,nsv,rm,ivf,wtv,dv,"
    "dhav,nuv,pva,swf,ty,film_cpk,r3d,smjpeg,mpjpeg,yuv4mpegpipe,h261,h263,h264,hevc,vvc,evc,apv,av1,obu,m4v,mjpeg,"
    "mjpeg_2000,dirac,dnxhd,vc1,vc1test,cavsvideo,avs2,avs3,gif,apng,smk,bink,flic,roq"
)
_PICTURE_FORMATS = (
    "image2,bmp_pipe,cri_pipe,dds_pipe,dpx_pipe,exr_pipe,gem_pipe,gif_pipe,hdr_pipe,j2k_pipe,jpeg_pipe,jpegls_pipe,"
    "jpegxl_anim,jpegxl_pipe,jpegxs_pipe,pam_pipe,pbm_pipe,pcx_pipe,pfm_pipe,pgm_pipe,pgmyuv_pipe,pgx_pipe,phm_pipe,"
    "photocd_pipe,pictor_pipe,png_pipe,ppm_pipe,psd_pipe,qdraw_pipe,qoi_pipe,sgi_pipe,sunrast_pipe,tiff_pipe,vbn_pipe,"
    "webp_pipe,xbm_pipe,xpm_pipe,xwd_pipe"
)
_SOUND_FORMATS = "aac,ac3,aiff,amr,ape,au,caf,eac3,flac,mp3,w64,wav,wv"
_ONE_FILE = {
    "format_whitelist": f"{_VIDEO_FORMATS},{_PICTURE_FORMATS},{_SOUND_FORMATS}",
    "protocol_whitelist": "file",
    "pattern_type": "none",
}
"""Options under which FFmpeg reads the file itself and no other one.

They list the formats that hold what they show. Playlists (hls, dash, concat, sdp, …) open the files that they name
before a caller could refuse them. `image2` would take a path for a pattern of paths.
"""

_TITLES: dict[str, Any] = {"metadata_errors": "replace"} if hasattr(InputContainer, "metadata_errors") else {}
"""Accept titles and comments that are not UTF-8, as PyAV 19 and newer always do."""

_COVERS = Disposition.attached_pic | Disposition.timed_thumbnails
"""Streams of still pictures beside sound or video: covers and thumbnails."""

FPS_TOLERANCE = 0.01
"""Share by which a frame rate in a column may differ from its file's, since data sets round it."""

MAX_REORDERED = 17
"""Number of packets that hold the first frame shown: H.264 and HEVC store at most 16 frames before it."""

_INSTANT = 1e-6
"""Seconds by which times of frames differ at least, beyond rounding."""

_WITHOUT_DISPLAY_TIMES = {"avi", "asf"}
"""Containers, by FFmpeg's names, that store one time per packet, in ascending order."""

PYAV_ERRORS = av.error.FFmpegError, EOFError, IndexError, ArithmeticError, ValueError
"""What PyAV raises about files: errors of FFmpeg, and those of numbers in a header that fit no integer."""

_UNOPENABLE = (
    "{path} is neither an image nor a video that can be opened ({error}); it may be corrupt, cut off or of a format "
    "that is not read. Remove the row or write the file again."
)

DecodingRule = Literal["BT.709 without tags", "mapped to SDR", "times in ascending order"]
"""A rule, beyond FFmpeg's own, that decides the frames of some videos."""


class MediaInfo(NamedTuple):
    """Size, frames and frame rate that a file's header states.

    Attributes:
        width (`int`): Width in pixels, as shown.
        height (`int`): Height in pixels, as shown.
        num_frames (`int`): Number of frames; 1 for an image.
        fps (`float`): Frames per second, the mean if they vary; 0.0 for an image.
        num_frames_estimated (`bool`): Whether the number of frames was computed from the duration, because no header
            states it.
    """

    width: int
    height: int
    num_frames: int
    fps: float
    num_frames_estimated: bool = False


class FileHeader(NamedTuple):
    """Header of an image or video.

    Attributes:
        info ([`MediaInfo`]): Size, frames and frame rate.
        may_be_transparent (`bool`): Whether the file can hold transparent parts; it may have none.
    """

    info: MediaInfo
    may_be_transparent: bool


def probe(source: MediaSource, *, exact: bool = False, max_pixels: int = MAX_PIXELS) -> MediaInfo:
    """Read size, frames and frame rate from a file's header; arguments and errors are those of [`read_header`]."""
    return read_header(source, exact=exact, max_pixels=max_pixels).info


def read_header(source: MediaSource, *, exact: bool = False, max_pixels: int = MAX_PIXELS) -> FileHeader:
    """Read the header of an image (with Pillow) or a video (with PyAV).

    Sizes are those of the frames that `iter_frames` yields: EXIF orientation and display rotation are applied, and
    pixels that are not square are stretched along the width.

    Args:
        source ([`MediaSource`]): The file.
        exact (`bool`): Whether to count the packets of a video instead of trusting its header; this reads the whole
            file.
        max_pixels (`int`): Largest frame, in pixels. Pillow has its own limit, twice `PIL.Image.MAX_IMAGE_PIXELS`.

    Raises:
        MediaError: If the file is neither image nor video, is broken, has only sound, claims larger frames, or states
            no number of frames.
    """
    source = source.opened(headers=True)
    with open_image(source) as image:
        if image is not None:
            width, height = upright_size(image)
            check_pixels(source, width, height, max_pixels=max_pixels)
            return FileHeader(MediaInfo(width, height, 1, 0.0), image.has_transparency_data)
    header = read_video_header(source, exact=exact, max_pixels=max_pixels)
    return FileHeader(header.info, header.may_be_transparent)


def check_unchanged(source: MediaSource, info: MediaInfo, *, row: MediaInfo) -> None:
    """Raise if a file is not the one that its row describes, as after it was replaced.

    Width and height must be equal. A row may have fewer frames per second than its file, where it was prepared for a
    lower rate, but not more, which would repeat frames; rates of columns may be rounded. Its frames may be those of a
    clip, or follow from a rounded duration: `iter_frames` finds out if the file has too few.

    Args:
        source ([`MediaSource`]): The file.
        info ([`MediaInfo`]): What its header says.
        row ([`MediaInfo`]): What its row says.

    Raises:
        MediaError: If they do not agree.
    """
    same_size = (info.width, info.height) == (row.width, row.height)
    if same_size and bool(row.fps) == bool(info.fps) and _fast_enough(info, row):
        return
    if same_size and row.num_frames == info.num_frames == 1 and 0.0 in (row.fps, info.fps):
        return  # columns know no rate of a single frame, and without pillow-heif a HEIC picture has one
    if same_size and row.fps and info.fps and _fast_enough(read_video_header(source, exact=True).info, row):
        return  # the header's rate is wrong, and the row's was counted
    raise MediaError(
        f"{source.path} is {_described(info)}, but its row was made for {_described(row)}: the file was replaced, or "
        "the row's sizes are wrong. Prepare the data set again, with sizes from headers."
    )


def _fast_enough(info: MediaInfo, row: MediaInfo) -> bool:
    return row.fps <= info.fps * (1 + FPS_TOLERANCE)


def _described(info: MediaInfo) -> str:
    size = f"{info.width}×{info.height}"
    return f"a video of {size} pixels at {info.fps:.4g} fps" if info.fps else f"an image of {size} pixels"


def frames_at_fps(
    num_frames: npt.ArrayLike, fps: npt.ArrayLike, target_fps: float | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return how many frames videos have at a lower frame rate, and that rate; frames are dropped, never invented.

    Args:
        num_frames (`int` array): Frames in each file.
        fps (`float` array): Frames per second of each file; 0.0 for an image.
        target_fps (`float`, *optional*): Target frames per second; slower files keep their own rate.

    Returns:
        `tuple`: Frames (`int64`) and frames per second (`float64`), each of the shape of `num_frames`.

    Example:
        >>> frames_at_fps([48, 48, 1], [24.0, 8.0, 0.0], 16.0)
        (array([32, 48,  1]), array([16.,  8.,  0.]))
    """
    count, rate = np.asarray(num_frames, np.int64), np.asarray(fps, np.float64)
    if target_fps is None:
        return count, rate
    slower = rate > target_fps
    kept = np.floor((count - 1) * target_fps / np.where(slower, rate, 1.0) + 1e-6).astype(np.int64) + 1
    return np.where(slower, kept, count), np.where(slower, float(target_fps), rate)


_Count = tuple[int, float, bool, float]
"""Frames, frames per second, whether the frames are estimated, and seconds as in [`VideoHeader`]."""


class VideoHeader(NamedTuple):
    """Headers of a video.

    Attributes:
        info ([`MediaInfo`]): Size as shown, frames and frame rate.
        seconds (`float`): Duration from the first frame to the end of the last; 0.0 if it is not certain.
        stretched (`tuple[int, int]`): Width and height of a frame with square pixels, before rotation.
        turn ([`Turn`]): Rotation and mirroring that then make the frame upright.
        may_be_transparent (`bool`): Whether frames have an opacity beside their colours.
    """

    info: MediaInfo
    seconds: float
    stretched: tuple[int, int]
    turn: Turn
    may_be_transparent: bool


def read_video_header(
    source: MediaSource, *, exact: bool = False, quick: bool = False, max_pixels: int = MAX_PIXELS
) -> VideoHeader:
    """Read a video's headers; raises as `read_header`.

    No frame is decoded, unless FFmpeg needs some for a rare codec. With `quick`, a number of frames may be a guess
    where `probe` would read the whole file to count them.
    """
    with reading(source, _UNOPENABLE), source.open_binary() as file:
        name = container_of(file.read(12))
        with _open_headers(source, name) as container:
            stream = _usable_stream(source, container, file)
            stretched = _stretched(stream)
            check_pixels(source, max(stream.width, stretched[0]), stream.height, max_pixels=max_pixels)
            position = container.streams.video.index(stream)
            transparent = _has_opacity(stream)
            turn = read_turn(file, name, track_id=stream.id, position=position)
            count = _count_packets(container, stream) if exact else _read_count(container, stream, name, quick=quick)
    num_frames, fps, estimated, seconds = count
    if not (0 < num_frames < 2**31 and fps > 0):
        raise MediaError(
            f"{source.path} names no usable video: {num_frames} frames at {fps} fps.",
            advice=["write the file again with ffmpeg", "count its packets with `exact=True`", "remove the row"],
        )
    size = stretched[::-1] if turn.transposed else stretched
    return VideoHeader(MediaInfo(*size, num_frames, fps, estimated), seconds, stretched, turn, transparent)


def decoding_rules(source: MediaSource) -> list[DecodingRule]:
    """Return the rules, beyond FFmpeg's own, by which a video is decoded; none for an image.

    Keys of caches name them, so that entries which older releases made of such videos are not taken for theirs.

    Raises:
        MediaError: If the file cannot be opened.
    """
    source = source.opened(headers=True)
    with open_image(source) as image:
        if image is not None:
            return []
    with reading(source, _UNOPENABLE), source.open_binary() as file:
        name = container_of(file.read(12))
        with _open_headers(source, name) as container:
            rules = _rules_of(container, _usable_stream(source, container, file))
        if name is not None and "BT.709 without tags" in rules:  # FFmpeg may have to decode a frame for the tags
            with open_video(source) as container:
                rules = _rules_of(container, _usable_stream(source, container, file))
    return rules


def _rules_of(container: InputContainer, stream: VideoStream) -> list[DecodingRule]:
    context = stream.codec_context
    rules: list[DecodingRule] = []
    if Colours.of(context).mapped:
        rules.append("mapped to SDR")
    elif is_untagged_hd(context):
        rules.append("BT.709 without tags")
    if are_times_of_decoding(container, stream, [*islice(container.demux(stream), MAX_REORDERED)]):
        rules.append("times in ascending order")
    return rules


def check_pixels(source: MediaSource, width: int, height: int, *, max_pixels: int) -> None:
    """Raise if a frame is too large, before anything is allocated for it."""
    if width * height > max_pixels:
        raise MediaError(
            f"{source.path} claims {width}×{height} pixels, more than `max_pixels={max_pixels}`; remove the row."
        )


def open_video(
    source: MediaSource, *, name: ContainerName | None = None, options: dict[str, str] | None = None
) -> InputContainer:
    """Open a video with PyAV; it reads no other file, and titles and comments need not be UTF-8."""
    return av.open(source.open(), "r", format=name, options=options, container_options=_ONE_FILE, **_TITLES)


@contextmanager
def reading(source: MediaSource, refusal: str) -> Iterator[None]:
    """Turn what PyAV raises in a `with` block about a file into a `MediaError` that names it.

    Args:
        source ([`MediaSource`]): The file.
        refusal (`str`): What could not be done, and what to do, with `{path}` and `{error}`.
    """
    try:
        yield
    except BucketingError:
        raise
    except PYAV_ERRORS as error:
        with source.open_binary() as file:
            playlist = playlist_of(file.read(12))
        if playlist is not None:
            raise MediaError(
                f"{source.path} is {playlist}, which names other files; name the videos themselves, or remove the row."
            ) from error
        raise MediaError(refusal.format(path=source.path, error=error)) from error


def video_stream(container: InputContainer) -> VideoStream | None:
    """Return the video stream that players show: the first default one, or the first; never a cover picture."""
    streams = [stream for stream in container.streams.video if not stream.disposition & _COVERS]
    defaults = (stream for stream in streams if stream.disposition & Disposition.default)
    return next(defaults, next(iter(streams), None))


def _has_opacity(stream: VideoStream) -> bool:
    """Return whether frames of a stream have an opacity beside their colours, by its header."""
    codec = stream.codec_context
    return bool(opacity_decoder(stream)) or (
        codec is not None and codec.format is not None and with_opacity(codec.format)
    )


def opacity_decoder(stream: VideoStream) -> str:
    """Return the decoder of a stream's colours and opacity where FFmpeg's own leaves out the latter, else `""`."""
    codec = stream.codec_context
    if codec is None or stream.metadata.get("alpha_mode") != "1":
        return ""
    return {"vp8": "libvpx", "vp9": "libvpx-vp9"}.get(codec.name, "")


def _usable_stream(source: MediaSource, container: InputContainer, file: BinaryIO) -> VideoStream:
    stream = video_stream(container)
    if stream is None:
        raise MediaError(f"{source.path} holds no video stream; remove the row.")
    if container.format.name.startswith("jpegxl") and stream.codec_context is None:
        raise MediaError(
            f"{source.path} is a JPEG XL picture, which neither Pillow nor PyAV reads; convert it, for example with "
            "djxl to PNG, or remove the row."
        )
    if stream.codec_context is None or min(stream.width, stream.height) < 1:
        raise MediaError(f"{source.path} names no codec and size that FFmpeg knows; write the file again with ffmpeg.")
    _check_complete(source, container, stream, file)
    return stream


def _check_complete(source: MediaSource, container: InputContainer, stream: VideoStream, file: BinaryIO) -> None:
    """Raise for a picture of which a stream is only a part: PyAV yields tiles one by one, and none of them turned."""
    tiles = sum(bool(other.disposition & Disposition.dependent) for other in container.streams.video)
    changes = picture_changes(file)
    if tiles and not stream.disposition & Disposition.default:
        changes.insert(0, f"consists of {tiles} tiles")
    if changes:
        raise MediaError(
            f"{source.path} is a picture that {' and '.join(changes)}, which PyAV does not show as a whole.",
            advice=['install pillow-heif, which reads HEIC: pip install "hf_bucketing[heic]"', "convert it to JPEG"],
        )


def _open_headers(source: MediaSource, name: ContainerName | None) -> InputContainer:
    """Open a video with the least reading and decoding that gives what is needed."""
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
    return known and frame_rate(stream) > 0 and (stream.frames > 0 or not needs_count)


def _stretched(stream: VideoStream) -> tuple[int, int]:
    ratio = stream.sample_aspect_ratio
    return max(1, round(stream.width * ratio)) if ratio and ratio > 0 else stream.width, stream.height


def frame_rate(stream: VideoStream) -> float:
    """Return the mean frames per second that a header states, 0.0 if it states none."""
    return float(stream.average_rate or stream.guessed_rate or 0)


def _read_count(container: InputContainer, stream: VideoStream, name: ContainerName | None, *, quick: bool) -> _Count:
    """Take the number of frames from the header if its duration agrees, otherwise from the last frame's time.

    The two disagree if an edit list hides frames, or if a fragmented file counts only its first fragment. The duration
    of the whole file cannot be used, because it may be that of the sound. Other containers than mp4 and Matroska state
    durations that are guesses (MPEG-PS, MPEG-TS) or begin elsewhere (ASF), so that their packets are counted.
    """
    fps = frame_rate(stream)
    seconds = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
    if stream.frames and (seconds <= 0 or abs(seconds * fps - stream.frames) < 0.5):
        return stream.frames, fps, False, max(seconds, 0.0)
    last = -1.0
    if name is not None:
        last = _last_time(container, stream)
        container.seek(0)
    elif quick and fps:
        last = seconds - 1 / fps
    if last >= 0:
        return round(last * fps) + 1, fps, True, 0.0
    return _count_packets(container, stream)


def _last_time(container: InputContainer, stream: VideoStream) -> float:
    """Return the seconds from the first to the last frame, −1 if unknown; read only from the last key frame on."""
    if not container.duration or not stream.time_base:
        return -1.0
    start = min(islice(display_stamps(container, stream), MAX_REORDERED), default=0)
    container.seek(start + int(container.duration / av.time_base / stream.time_base), stream=stream)
    end = max(display_stamps(container, stream), default=start - 1)
    return float((end - start) * stream.time_base) if end >= start else -1.0


def display_stamps(container: InputContainer, stream: VideoStream) -> Iterator[int]:
    """Yield the display times of packets in decoding order, without those that an edit list hides."""
    for packet in container.demux(stream):
        yield from stamps_of([packet])


def stamps_of(packets: Sequence[Packet]) -> list[int]:
    """Return the display times of packets, without those that an edit list hides."""
    return [packet.pts for packet in packets if packet.size and packet.pts is not None and not packet.is_discard]


def are_times_of_decoding(container: InputContainer, stream: VideoStream, packets: Sequence[Packet]) -> bool:
    """Return whether the display times of a video are times of decoding, though its codec reorders frames.

    AVI and ASF store no others, and an mp4 may have lost them. Where early frames are in order, both are the same.

    Args:
        container (`InputContainer`): The file.
        stream (`VideoStream`): Its video, opened with its decoder.
        packets (sequence of `Packet`): The first packets.
    """
    stamps = stamps_of(packets)
    ascending = all(early < late for early, late in pairwise(stamps))
    alike = all(packet.dts in (None, packet.pts) for packet in packets)
    may_differ = bool(stream.codec_context.has_b_frames) and len(stamps) > 1
    return may_differ and ascending and (alike or container.format.name in _WITHOUT_DISPLAY_TIMES)


def next_time(time: float | None, previous: float | None, *, rate: float) -> float:
    """Return when a frame is shown that a decoder returns after another, in seconds.

    Frames leave a decoder in the order of display. A time that contradicts it, or is missing, is that of a constant
    rate.

    Args:
        time (`float`, *optional*): Time that the file states, in seconds.
        previous (`float`, *optional*): Time of the frame before it.
        rate (`float`): Frames per second.
    """
    if time is not None and (previous is None or time > previous + _INSTANT):
        return time
    return 0.0 if previous is None else previous + 1 / rate


def _count_packets(container: InputContainer, stream: VideoStream) -> _Count:
    """Count the packets that are shown; correct the header's frame rate if it does not fit their times.

    A file that was cut out of another may begin with frames that refer to missing ones, which no decoder shows: those
    before the first key frame, in the order of decoding or of display.
    """
    fps = frame_rate(stream)
    packets = [
        (packet.pts, packet.is_keyframe, packet.is_discard) for packet in container.demux(stream) if packet.size
    ]
    first = next((place for place, (_, is_key, _) in enumerate(packets) if is_key), 0)
    start = packets[first][0] if packets else None
    stamps = [
        stamp
        for stamp, _, is_discarded in packets[first:]
        if not is_discarded and (stamp is None or start is None or stamp >= start)
    ]
    count = len(stamps)
    last = _seconds_to_last([stamp for stamp in stamps if stamp is not None], stream)
    if last > 0 and abs(last * fps - (count - 1)) > 0.25:
        fps = (count - 1) / last
    return count, fps, False, last


def _seconds_to_last(stamps: Iterable[int], stream: VideoStream) -> float:
    """Return the seconds from the first to the last frame of packets; times that jump back continue at its rate."""
    waiting: list[int] = []
    ordered: list[int] = []
    for stamp in stamps:
        heapq.heappush(waiting, stamp)
        if len(waiting) > MAX_REORDERED:
            ordered.append(heapq.heappop(waiting))
    first: float | None = None
    time: float | None = None
    for stamp in [*ordered, *sorted(waiting)]:
        time = next_time(float(stamp * (stream.time_base or 0)), time, rate=frame_rate(stream) or 1.0)
        first = time if first is None else first
    return 0.0 if time is None or first is None else time - first
