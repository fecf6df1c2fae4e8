"""Videos whose headers are not plain: turned, stretched, of variable rate, uncounted, cut off, or only sound."""

from __future__ import annotations

import os
import struct
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.stream import Disposition
from PIL import Image

from hf_bucketing import MediaError
from hf_bucketing.media import MediaSource, frame_times, frames_at_fps, iter_frames, probe, write_video
from hf_bucketing.media.probe import next_time
from tests.conftest import run
from tests.media.test_media import HEIGHT, WIDTH, numbered_frames, numbers, source

CORNERS = np.uint8([[20, 90], [160, 235]]).repeat(HEIGHT // 2, 0).repeat(WIDTH // 2, 1)[..., None].repeat(3, 2)
"""A picture that looks different in all eight orientations."""


def encode(
    path: Path, frames, *, rate=12, stamps=None, last=None, earlier=0, muxer=None, prepare=None, **options
) -> MediaSource:
    """Write what `write_video` does not: times and a last duration in ms, packets moved before 0, other headers."""
    with av.open(str(path), "w", options=muxer or {}) as container:
        codec = options.pop("codec", "libx264")
        stream = container.add_stream(codec, rate=1000 if stamps else rate, options=options)
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "yuv420p"
        if prepare is not None:
            prepare(stream)
        packets = []
        for number, array in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(array, format="rgb24")
            frame.pts, frame.time_base = stamps[number] if stamps else number, Fraction(1, 1000 if stamps else rate)
            packets += stream.encode(frame)
        packets += stream.encode()
        for packet in packets:
            packet.pts, packet.dts = packet.pts - earlier, packet.dts - earlier
        packets[-1].duration = last or packets[-1].duration
        container.mux(packets)
    return source(str(path))


def test_millisecond_time_stamps_pick_the_same_frames(tmp_path: Path) -> None:
    clip = encode(tmp_path / "clip.mkv", numbered_frames(40), rate=24)  # Matroska rounds 1/24 s to whole milliseconds
    assert probe(clip) == (WIDTH, HEIGHT, 40, 24.0, True)
    assert numbers(iter_frames(clip, frame_times(14, 8.0))) == list(range(0, 40, 3))


def test_a_video_that_is_cut_off_after_its_header_is_an_error_at_decoding(tmp_path: Path) -> None:
    noise = list(np.random.default_rng(0).integers(0, 255, (40, HEIGHT, WIDTH, 3), dtype=np.uint8))
    path = Path(encode(tmp_path / "fast.mp4", noise, muxer={"movflags": "faststart"}).path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert probe(source(str(path))).num_frames == 40
    with pytest.raises(MediaError, match=r"fast\.mp4"):
        list(iter_frames(source(str(path)), frame_times(40, 12.0)))


def sound(path: Path, codec: str, *, cover: bool = False) -> MediaSource:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=8000, layout="mono")
        picture = container.add_stream("mjpeg", rate=1) if cover else None
        if picture is not None:
            picture.height, picture.width, picture.pix_fmt = HEIGHT, WIDTH, "yuvj420p"
            picture.disposition = Disposition.attached_pic.value
            container.mux(picture.encode(av.VideoFrame.from_ndarray(CORNERS, format="rgb24")))
            container.mux(picture.encode())
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 576), np.int16), format="s16p", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return source(str(path))


@pytest.mark.parametrize(("name", "codec", "cover"), [
    ("sound.wav", "pcm_s16le", False), ("song.mp3", "libmp3lame", False), ("album.mp3", "libmp3lame", True),
])  # fmt: skip
def test_sound_has_no_video_also_with_a_cover_picture(tmp_path: Path, name: str, codec: str, cover: bool) -> None:
    with pytest.raises(MediaError, match="no video stream"):
        probe(sound(tmp_path / name, codec, cover=cover))


def upright(degrees: int, *, mirrored: bool = False) -> np.ndarray:
    picture = np.rot90(CORNERS, degrees // 90)
    return picture[:, ::-1] if mirrored else picture


def assert_shows(clip: MediaSource, picture: np.ndarray) -> None:
    assert probe(clip)[:2] == picture.shape[1::-1]
    (frame,) = iter_frames(clip, [0.1])
    assert frame.shape == picture.shape
    assert frame.flags.c_contiguous
    assert np.abs(frame.astype(int) - picture).mean() < 5


def turn(degrees: int, *, mirrored: bool = False):
    return lambda stream: rotate(stream, degrees, mirrored=mirrored)


def rotate(stream, degrees: int, *, mirrored: bool = False) -> None:
    if not hasattr(stream, "set_display_rotation"):
        pytest.skip(f"PyAV {av.__version__} cannot write how a video is turned")
    stream.set_display_rotation(degrees, hflip=mirrored)


@pytest.mark.parametrize("suffix", ["mp4", "mov", "mkv"])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_a_turned_video_is_probed_and_decoded_upright(tmp_path: Path, suffix: str, mirrored: bool, degrees) -> None:
    clip = encode(tmp_path / f"turned.{suffix}", [CORNERS] * 3, prepare=turn(degrees, mirrored=mirrored))
    assert_shows(clip, upright(degrees, mirrored=mirrored))


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_the_turn_of_the_video_is_told_from_that_of_the_sound(tmp_path: Path, suffix: str) -> None:
    with av.open(str(tmp_path / f"talk.{suffix}"), "w") as container:
        audio, video = container.add_stream("aac", rate=8000, layout="mono"), container.add_stream("libx264", rate=12)
        video.height, video.width, video.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        rotate(video, 90)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 8000
        picture = av.VideoFrame.from_ndarray(CORNERS, format="rgb24")
        container.mux([*audio.encode(silence), *audio.encode(), *video.encode(picture), *video.encode()])
    clip = source(str(tmp_path / f"talk.{suffix}"))
    assert probe(clip)[:3] == (HEIGHT, WIDTH, 1)
    assert next(iter_frames(clip, [0.0])).shape == (WIDTH, HEIGHT, 3)


def in_memory(data: bytes) -> MediaSource:
    return source({"path": "patched", "bytes": data})


def test_unusual_headers_of_mp4_files_are_read_as_ffmpeg_reads_them(tmp_path: Path) -> None:
    data = Path(encode(tmp_path / "clip.mp4", [CORNERS] * 3, prepare=turn(90)).path).read_bytes()
    movie = data.index(b"mvhd") + 4 + 36
    quarter = struct.pack(">9i", 0, -65536, 0, 65536, 0, 0, 0, 0, 2**30)
    assert_shows(in_memory(data[:movie] + quarter + data[movie + 36 :]), upright(180))
    free, moov = data.index(b"free") - 4, data.index(b"moov") - 4
    wide = struct.pack(">I4sQ", 1, b"mdat", moov - free)
    assert_shows(in_memory(data[:free] + wide + data[free + 16 :]), upright(90))
    assert_shows(in_memory(data[:moov] + bytes(4) + data[moov + 4 :]), upright(90))
    hidden = in_memory(data[:moov] + struct.pack(">I4s", 8, b"free") * 10_001 + data[moov:])
    with pytest.raises(MediaError, match="turns its frames by 90"):
        list(iter_frames(hidden, [0.0]))


def test_unusual_headers_of_matroska_files_are_read_as_ffmpeg_reads_them(tmp_path: Path) -> None:
    live = encode(tmp_path / "live.mkv", [CORNERS] * 3, prepare=turn(270), muxer={"live": "1"})
    assert_shows(live, upright(270))
    spherical = Path(encode(tmp_path / "clip.mkv", [CORNERS] * 3, prepare=turn(90, mirrored=True)).path).read_bytes()
    assert spherical.count(struct.pack(">d", 180)) == 1
    assert_shows(in_memory(spherical.replace(struct.pack(">d", 180), struct.pack(">d", 30))), CORNERS)


@pytest.mark.parametrize(("ratio", "degrees", "size"), [
    ("4/3", 0, (107, HEIGHT)), ("3/4", 0, (60, HEIGHT)), ("4/3", 90, (HEIGHT, 107)), ("1/1", 0, (WIDTH, HEIGHT)),
])  # fmt: skip
def test_pixels_that_are_not_square_are_stretched(tmp_path: Path, ratio: str, degrees: int, size) -> None:
    def prepare(stream) -> None:
        stream.codec_context.sample_aspect_ratio = Fraction(ratio)
        rotate(stream, degrees)

    wide = np.asarray(Image.fromarray(CORNERS).resize(size if degrees == 0 else size[::-1], Image.Resampling.BICUBIC))
    in_container = encode(tmp_path / "container.mp4", [CORNERS] * 3, prepare=prepare)
    data = (tmp_path / "container.mp4").read_bytes()
    in_bitstream = in_memory(data.replace(b"pasp", b"free"))
    for clip in (in_container, in_bitstream):
        assert_shows(clip, np.rot90(wide, degrees // 90))
        shown = max(size[0] * size[1], WIDTH * HEIGHT)
        assert probe(clip, max_pixels=shown)[:2] == size
        with pytest.raises(MediaError, match="max_pixels"):
            probe(clip, max_pixels=shown - 1)


STAMPS = [0, 100, 200, 300, 350, 900, 1000, 3000, 3100, 3200]


@pytest.mark.parametrize(("name", "last", "rate"), [
    ("even.mp4", None, 10 / 3.201), ("long.mp4", 5000, 10 / 8.2), ("even.mkv", None, None),
])  # fmt: skip
def test_a_variable_frame_rate_promises_only_frames_that_there_are(tmp_path: Path, name: str, last, rate) -> None:
    clip = encode(tmp_path / name, numbered_frames(10), stamps=STAMPS, last=last, bf="0")
    read, counted = probe(clip), probe(clip, exact=True)
    assert counted == (WIDTH, HEIGHT, 10, pytest.approx(9 / 3.2), False)
    if rate is None:
        assert read == (WIDTH, HEIGHT, 3201, 1000.0, True), "the header claims 1000 fps and does not count"
    else:
        assert read == (WIDTH, HEIGHT, 10, pytest.approx(rate), False)
    for info in (read, counted):
        for target in (1.0, 2.0, 3.3, 12.0):
            count, fps = frames_at_fps(info.num_frames, info.fps, target)
            times = frame_times(int(count), float(fps))
            slack = 250 / read.fps  # a quarter of a frame
            shown = [max(n for n, stamp in enumerate(STAMPS) if stamp < 1000 * time + slack) for time in times]
            assert numbers(iter_frames(clip, times)) == shown
            assert times[-1] <= 3.2 + (last or 0) / 1000


@pytest.mark.parametrize(("name", "muxer", "earlier", "count", "estimated"), [
    ("edited.mp4", None, 3, 21, True),
    ("pieces.mp4", {"movflags": "frag_keyframe"}, 0, 24, True),
    ("stream.mp4", {"movflags": "frag_keyframe+empty_moov"}, 0, 24, True),
    ("clip.mkv", None, 0, 24, True),
    ("clip.ts", None, 0, 24, False),
    ("live.mkv", {"live": "1"}, 0, 24, False),
    ("flash.flv", None, 0, 24, False),
])  # fmt: skip
def test_without_a_count_that_holds_frames_follow_from_time_or_are_counted(
    tmp_path: Path, name: str, muxer, earlier: int, count: int, estimated: bool
) -> None:
    clip = encode(tmp_path / name, numbered_frames(24), earlier=earlier, muxer=muxer, g="6")
    assert probe(clip) == (WIDTH, HEIGHT, count, 12.0, estimated)
    assert probe(clip, exact=True) == (WIDTH, HEIGHT, count, 12.0, False)
    assert len(list(iter_frames(clip, frame_times(count, 12.0)))) == count


def test_a_streamed_video_that_is_cut_off_is_counted_up_to_there(tmp_path: Path) -> None:
    noise = list(np.random.default_rng(0).integers(0, 255, (40, HEIGHT, WIDTH, 3), dtype=np.uint8))
    index_first = {"reserve_index_space": "4000", "cluster_time_limit": "300"}
    path = Path(encode(tmp_path / "clip.mkv", noise, muxer=index_first, g="6").path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    info = probe(source(str(path)))
    assert 12 <= info.num_frames < 24
    assert len(list(iter_frames(source(str(path)), frame_times(info.num_frames, 12.0)))) == info.num_frames


def with_b_frames(stream) -> None:
    stream.codec_context.max_b_frames, stream.codec_context.gop_size = 2, 12
    stream.codec_context.bit_rate = 4_000_000  # the rate by default cannot tell the grey levels of frames apart


B_FRAMES = "bframes=2:b-adapt=0:scenecut=0:keyint=12"
CONTAINERS = [
    ("avi", "libx264", B_FRAMES), ("avi", "libx264", B_FRAMES + ":open-gop=1"), ("avi", "mpeg4", None),
    ("mkv", "libx264", B_FRAMES), ("flv", "libx264", B_FRAMES), ("ts", "libx264", B_FRAMES), ("mp4", "mpeg4", None),
    ("h264", "libx264", B_FRAMES), ("mpg", "mpeg2video", None), ("ts", "mpeg2video", None), ("mov", "mpeg4", None),
    ("asf", "libx264", B_FRAMES), ("mxf", "mpeg2video", None), ("mpg", "libx264", B_FRAMES),
]  # fmt: skip
"""Containers of frames that are not stored in the order of display, and options of x264."""


@pytest.mark.parametrize(("suffix", "codec", "x264"), CONTAINERS)
def test_frames_come_once_each_and_in_order_from_every_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, codec: str, x264: str | None
) -> None:
    options = {"crf": "8", "x264-params": x264} if x264 else {"qmin": "1", "qmax": "2", "bf": "2"}
    path = tmp_path / f"clip.{suffix}"
    assert_in_order(encode(path, numbered_frames(36), rate=25, codec=codec, prepare=with_b_frames, **options), 36)
    monkeypatch.setattr("hf_bucketing.media.decode._SEEK_FROM", 0.05)
    late = iter_frames(source(str(path)), frame_times(4, 25.0, start=17), video_decoder="pyav")
    assert numbers(late) == [17, 18, 19, 20]


def assert_in_order(clip: MediaSource, count: int, *, first: int = 0) -> None:
    info = probe(clip)
    assert (info.num_frames, info.fps) == (count, 25.0)
    times = frame_times(count, info.fps)
    assert numbers(iter_frames(clip, times, video_decoder="pyav")) == list(range(first, first + count))


def test_times_that_are_broken_or_jump_back_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers an mp4 whose times of display are lost, and MPEG-TS that was joined or cut."""
    options = {"crf": "8", "x264-params": B_FRAMES + ":open-gop=1"}
    data = {
        suffix: Path(encode(tmp_path / f"clip.{suffix}", numbered_frames(36), rate=25, **options).path).read_bytes()
        for suffix in ("mp4", "ts")
    }
    monkeypatch.setattr("hf_bucketing.media.decode._SEEK_FROM", 0.05)
    untimed = in_memory(data["mp4"].replace(b"ctts", b"free").replace(b"edts", b"free"))
    assert_in_order(untimed, 36)
    assert numbers(iter_frames(untimed, frame_times(3, 25.0, start=20), video_decoder="pyav")) == [20, 21, 22]
    joined = in_memory(data["ts"] * 2)
    assert probe(joined)[2:4] == (72, 25.0)
    times = frame_times(72, 25.0)
    assert numbers(iter_frames(joined, times, video_decoder="pyav")) == [*range(36)] * 2
    cut = in_memory(data["ts"][188 * 16 :])
    assert_in_order(cut, 24, first=12)


def test_times_of_frames_ascend_at_the_rate_where_a_file_says_otherwise() -> None:
    times: list[float] = []
    for stated in (None, 0.1, 0.1, 0.05, 0.3, 0.7):
        times.append(next_time(stated, times[-1] if times else None, rate=10.0))
    assert times == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.7])


@pytest.mark.parametrize(("codec", "suffix"), [("mpeg4", "mp4"), ("mpeg2video", "mkv"), ("libvpx-vp9", "mp4")])
def test_other_codecs_have_their_size_and_pixel_ratio(tmp_path: Path, codec: str, suffix: str) -> None:
    def prepare(stream) -> None:
        stream.codec_context.sample_aspect_ratio = Fraction(16, 15)

    clip = encode(tmp_path / f"clip.{suffix}", [CORNERS] * 3, codec=codec, rate=25, prepare=prepare)
    (frame,) = iter_frames(clip, [0.0])
    assert probe(clip)[:3] == (*frame.shape[1::-1], 3)
    assert frame.shape[1] == pytest.approx(WIDTH * 16 / 15, abs=1)


def test_sound_that_is_longer_than_the_picture_adds_no_frames(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "talk.mkv"), "w") as container:
        video, audio = container.add_stream("libx264", rate=12), container.add_stream("pcm_s16le", rate=8000)
        video.height, video.width, video.pix_fmt, audio.layout = HEIGHT, WIDTH, "yuv420p", "mono"
        for array in numbered_frames(12):
            container.mux(video.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 40_000), np.int16), format="s16", layout="mono")
        silence.sample_rate = 8000
        container.mux([*video.encode(), *audio.encode(silence), *audio.encode()])
    assert probe(source(str(tmp_path / "talk.mkv"))) == (WIDTH, HEIGHT, 12, 12.0, True)


@pytest.mark.cases(fast=("reordered.mp4-*",), slow=("*",))
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize(("name", "stamps", "earlier", "options"), [
    ("reordered.mp4", None, 0, {"g": "9", "bf": "3"}),
    ("open.mkv", None, 0, {"g": "9", "bf": "3", "x264-params": "open-gop=1"}),
    ("edited.mp4", None, 3, {"g": "9", "bf": "0"}),
    ("uneven.mp4", [round(1000 * (n / 12 + n % 3 / 40)) for n in range(40)], 0, {"g": "9", "bf": "2"}),
    ("one-key-frame.mp4", None, 0, {"g": "250"}),
    ("clip.ts", None, 0, {"g": "9"}),
])  # fmt: skip
def test_frames_late_in_a_file_are_those_that_decoding_from_its_start_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stamps, earlier: int, options: dict[str, str]
) -> None:
    clip = encode(tmp_path / name, numbered_frames(40), stamps=stamps, earlier=earlier, **options)
    info = probe(clip)

    def decode_three(start: float) -> list[int]:
        return numbers(iter_frames(clip, [start + i / 12 for i in range(3)], video_decoder="pyav"))

    starts = [first / 10 for first in range(int((info.num_frames - 4) / info.fps * 10))]
    monkeypatch.setattr("hf_bucketing.media.decode._SEEK_FROM", 1e9)
    whole = [*map(decode_three, starts)]
    monkeypatch.setattr("hf_bucketing.media.decode._SEEK_FROM", 0.05)
    assert [*map(decode_three, starts)] == whole
    assert whole[-1][-1] > 34
    with pytest.raises(MediaError, match=r"ends after \d\d frames"):
        list(iter_frames(clip, [2.0, 9.0], video_decoder="pyav"))


def test_a_forked_process_decodes_after_its_parent_did(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", numbered_frames(3), fps=12)
    code = f"""
import multiprocessing
from hf_bucketing.media import MediaSource, iter_frames

def decode(path):
    return [int(frame.mean()) for frame in iter_frames(MediaSource.from_cell(path), [0.0, 0.1])]

path = {str(tmp_path / "clip.mp4")!r}
here = decode(path)
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.map_async(decode, [path]).get(60) == [here]
"""
    run([sys.executable, "-c", code], timeout=200)
