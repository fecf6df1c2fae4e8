"""Repeat the tests of media files with torchcodec, and compare its frames with PyAV's.

Run by test_torchcodec.py in a process that finds FFmpeg's shared libraries.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from hf_bucketing import BucketTable, MediaError, Size
from hf_bucketing.loaders import BucketCollator, worker_options
from hf_bucketing.media import MediaSource, View, ViewRule, frame_times, iter_frames, probe
from hf_bucketing.randomness import ROW
from tests.caching.test_latents import encoded, media  # noqa: F401 (a fixture)
from tests.media import test_media, test_video
from tests.media.test_colours import BARS, PQ, bars, signal_of
from tests.media.test_media import *  # noqa: F403
from tests.media.test_media import HEIGHT, WIDTH, numbered_frames, numbers, source
from tests.media.test_video import *  # noqa: F403
from tests.media.test_video import STAMPS, encode, turn

torchcodec_frames = partial(iter_frames, video_decoder="torchcodec")


@pytest.fixture(autouse=True)
def decoded_by_torchcodec(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (test_media, test_video):
        monkeypatch.setattr(module, "iter_frames", torchcodec_frames)


def spotted_frames(count: int, *, grey: bool = False) -> list[np.ndarray]:
    """Frames of spots that blend into one another, coloured or grey."""
    spots = np.random.default_rng(0).integers(0, 255, (count, 6, 10, 3), dtype=np.uint8)
    spots = spots[..., :1].repeat(3, -1) if grey else spots
    return [np.asarray(Image.fromarray(frame).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)) for frame in spots]


def assert_alike(clip: MediaSource, times: list[float], *, mean: float = 1.0, most: int = 4) -> None:
    ours, theirs = (np.stack(list(decode(clip, times))).astype(int) for decode in (torchcodec_frames, iter_frames))
    assert ours.shape == theirs.shape == (len(times), *probe(clip)[1::-1], 3)
    assert np.abs(ours - theirs).mean() < mean
    assert np.abs(ours - theirs).max() <= most


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("ratio", ["1/1", "4/3"])
def test_frames_are_pyavs_turned_mirrored_and_stretched(tmp_path: Path, ratio: str, mirrored: bool, degrees) -> None:
    def prepare(stream) -> None:
        stream.codec_context.sample_aspect_ratio = Fraction(ratio)
        turn(degrees, mirrored=mirrored)(stream)

    # Colour, stored at half the size, is enlarged at another moment where pixels are stretched.
    frames = spotted_frames(20, grey=ratio != "1/1")
    assert_alike(encode(tmp_path / "clip.mp4", frames, prepare=prepare, g="6"), frame_times(13, 8.0))


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_frames_are_pyavs_at_a_variable_rate_from_bytes(tmp_path: Path, suffix: str) -> None:
    path = Path(encode(tmp_path / f"clip.{suffix}", spotted_frames(10), stamps=STAMPS, bf="0", g="4").path)
    assert_alike(source({"path": None, "bytes": path.read_bytes()}), frame_times(13, 4.0))


@pytest.mark.parametrize("pixels", ["yuv444p", "yuvj420p", "yuv420p10le"])
def test_frames_are_pyavs_in_other_pixel_formats(tmp_path: Path, pixels: str) -> None:
    def prepare(stream) -> None:
        stream.pix_fmt = pixels

    clip = encode(tmp_path / "clip.mp4", spotted_frames(6, grey="10" in pixels), prepare=prepare)
    assert_alike(clip, frame_times(6, 12.0))


def test_colours_are_pyavs_in_high_definition_without_tags_and_in_hdr(tmp_path: Path) -> None:
    mild = BARS[[0, 1, 5, 6, 7]] / 255
    assert_alike(bars(tmp_path / "hd.mp4", "bt709", size=(720, 1280), colours=mild), [0.0])
    tags = {"colorspace": 9, "color_range": 1, "color_trc": PQ, "color_primaries": 9}
    signal = signal_of(np.float64([[203] * 3, [20] * 3, [50, 20, 10], [10, 50, 20]]), PQ)
    hdr = bars(tmp_path / "hdr.mkv", "bt2020", colours=signal, pixels="yuv420p10le", codec="ffv1", **tags)
    assert_alike(hdr, [0.0], mean=6, most=8)  # torchcodec cuts 10 bits to 8


def test_clips_late_in_a_file_begin_with_the_frame_at_their_start(tmp_path: Path) -> None:
    clip = encode(tmp_path / "clip.mp4", numbered_frames(40), g="9", bf="3")
    for first in (0, 7, 18, 30):
        view = View(size=Size(5, HEIGHT, WIDTH), fps=6.0, offset=first / 12, video_decoder="torchcodec")
        assert numbers(torchcodec_frames(clip, view.times)) == list(range(first, first + 10, 2))


def test_a_frame_that_is_shown_twice_is_a_new_array_each_time(tmp_path: Path) -> None:
    clip = encode(tmp_path / "clip.mp4", numbered_frames(3))
    first, again, second = torchcodec_frames(clip, [0.0, 0.01, 1 / 12])
    first[:] = 0
    assert numbers([again, second]) == [0, 1]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_file_that_is_cut_off_is_an_error_at_the_same_frame(tmp_path: Path, share: float) -> None:
    noise = list(np.random.default_rng(0).integers(0, 255, (40, HEIGHT, WIDTH, 3), dtype=np.uint8))
    path = Path(encode(tmp_path / "cut.mp4", noise, muxer={"movflags": "faststart"}, g="6", bf="0").path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    counts = []
    for decode in (torchcodec_frames, iter_frames):
        frames = []
        with pytest.raises(MediaError, match=r"cut\.mp4 (ends after|cannot be decoded).*Remove the row"):
            frames.extend(decode(source(str(path)), frame_times(40, 12.0)))
        counts.append(len(frames))
    assert counts[0] == pytest.approx(counts[1], abs=1)
    assert counts[0] > 40 * share - 4


def test_frames_that_torchcodec_cannot_find_are_an_error_that_names_pyav(tmp_path: Path) -> None:
    unsought = encode(tmp_path / "clip.ts", numbered_frames(24), g="6")
    assert numbers(iter_frames(unsought, [0.0])) == [0]
    with pytest.raises(MediaError, match=r'instead of the one at .*video_decoder="pyav"'):
        list(torchcodec_frames(unsought, [0.0]))
    reordered = encode(tmp_path / "clip.avi", numbered_frames(24), bf="2")
    with pytest.raises(MediaError, match=r'no times of display.*video_decoder="pyav"'):
        list(torchcodec_frames(reordered, [0.0]))
    with av.open(str(tmp_path / "raw.h264"), "w") as container:
        stream = container.add_stream("libx264", rate=12)
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        for array in numbered_frames(4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        container.mux(stream.encode())
    with pytest.raises(MediaError, match=r'video_decoder="pyav"'):
        list(torchcodec_frames(source(str(tmp_path / "raw.h264")), [0.0]))


def test_caches_tell_the_decoders_apart(media: Path) -> None:  # noqa: F811
    by_torchcodec = ViewRule(random_crop=False, video_decoder="torchcodec")
    assert encoded(media) == 10
    assert encoded(media, views=by_torchcodec) == 2, "the videos, not the images"
    assert encoded(media, views=by_torchcodec) == encoded(media) == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_collators_use_the_decoder_of_their_views(tmp_path: Path, num_workers: int) -> None:
    clip = encode(tmp_path / "clip.mkv", numbered_frames(24), rate=24)
    row = {"video": clip.path, "num_frames": 8, "fps": 8.0, "bucket_id": 0, ROW: 0}
    table = BucketTable(sizes=(Size(5, 32, 48),))
    batches = []
    for decoder in ("pyav", "torchcodec"):
        collator = BucketCollator(table, caption_column=None, seed=0, views=ViewRule(video_decoder=decoder))
        (batch,) = DataLoader([row], collate_fn=collator, **worker_options(num_workers))
        batches.append(batch["pixel_values"])
    assert batches[0].shape == (1, 3, 5, 32, 48)
    assert torch.allclose(*batches, atol=0.02)
