"""Files: opening, headers, frames, and what goes wrong with them."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from hf_bucketing import MediaError
from hf_bucketing.media import MediaSource, frame_times, frames_at_fps, iter_frames, probe, write_video

HEIGHT, WIDTH = 48, 80


def numbered_frames(count: int) -> list[np.ndarray]:
    """Frames whose brightness is their number times five."""
    return [np.full((HEIGHT, WIDTH, 3), 20 + 5 * number, np.uint8) for number in range(count)]


def numbers(frames) -> list[int]:
    return [round((float(frame.mean()) - 20) / 5) for frame in frames]


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    write_video(tmp_path / "clip.mp4", numbered_frames(24), fps=12)
    return tmp_path / "clip.mp4"


def source(cell, **options) -> MediaSource:
    return MediaSource.from_cell(cell, **options)


def test_a_video_header_gives_size_frames_and_rate(clip: Path) -> None:
    assert probe(source(str(clip))) == (WIDTH, HEIGHT, 24, 12.0, False)
    assert probe(source({"path": None, "bytes": clip.read_bytes()})) == (WIDTH, HEIGHT, 24, 12.0, False)


@pytest.mark.parametrize(("suffix", "orientation", "expected"), [
    ("png", None, (WIDTH, HEIGHT)), ("jpg", None, (WIDTH, HEIGHT)), ("jpg", 3, (WIDTH, HEIGHT)),
    ("jpg", 6, (HEIGHT, WIDTH)), ("jpg", 8, (HEIGHT, WIDTH)), ("webp", 5, (HEIGHT, WIDTH)),
    ("png", 7, (HEIGHT, WIDTH)), ("tiff", 6, (HEIGHT, WIDTH)), ("tiff", 2, (WIDTH, HEIGHT)),
    ("avif", 6, (HEIGHT, WIDTH)),
])  # fmt: skip
def test_an_image_header_gives_the_size_as_shown(tmp_path: Path, suffix, orientation, expected) -> None:
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    path = tmp_path / f"picture.{suffix}"
    Image.new("RGB", (WIDTH, HEIGHT)).save(path, exif=exif)
    assert probe(source(str(path))) == (*expected, 1, 0.0, False)
    (frame,) = iter_frames(source(str(path)), [0.0])
    assert frame.shape == (expected[1], expected[0], 3)


def test_probing_decodes_no_frame(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("a frame was decoded")

    picture = clip.with_name("picture.png")
    Image.new("RGB", (WIDTH, HEIGHT)).save(picture)
    monkeypatch.setattr(Image.Image, "load", refuse)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    opened = []
    real_open = av.open

    class Counting:
        def __init__(self, *args, **options):
            self.container = real_open(*args, **options)
            opened.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *args):
            self.container.close()

        def __getattr__(self, name: str):
            return refuse if name in ("decode", "demux") else getattr(self.container, name)

    monkeypatch.setattr(av, "open", Counting)
    assert probe(source(str(clip))).num_frames == 24
    assert probe(source(str(picture))).width == WIDTH
    assert len(opened) == 1


@pytest.mark.parametrize(("fps", "count", "start", "expected"), [
    (12.0, 4, 0, [0, 1, 2, 3]),
    (6.0, 4, 0, [0, 2, 4, 6]),
    (6.0, 3, 9, [18, 20, 22]),
    (8.0, 5, 0, [0, 1, 3, 4, 6]),
    (5.0, 4, 2, [5, 7, 9, 12]),
])  # fmt: skip
def test_frames_are_picked_at_the_wanted_rate(clip: Path, fps, count, start, expected) -> None:
    assert numbers(iter_frames(source(str(clip)), frame_times(count, fps, start=start))) == expected


@pytest.mark.parametrize("fps", [12.0, 8.0, 5.0, 23.976, 1.0])
def test_all_frames_that_are_counted_at_a_rate_can_be_decoded(clip: Path, fps: float) -> None:
    count, rate = frames_at_fps(24, 12.0, fps)
    assert rate == min(fps, 12.0)
    assert len(list(iter_frames(source(str(clip)), frame_times(count, rate)))) == count
    with pytest.raises(MediaError, match="promised"):
        list(iter_frames(source(str(clip)), frame_times(count + 1, rate)))


def test_a_corrupt_empty_missing_or_foreign_file_is_an_error_that_names_it(clip: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"\x00" * 500)
    empty = tmp_path / "empty.mp4"
    empty.write_bytes(b"")
    half_picture = io.BytesIO()
    Image.effect_noise((200, 200), 90).save(half_picture, "jpeg")
    cases = {
        "broken.mp4 is neither": str(broken),
        "empty.mp4 is empty": str(empty),
        "nowhere.mp4 does not exist": str(tmp_path / "nowhere.mp4"),
        "clip.bin is neither": {"path": "clip.bin", "bytes": clip.read_bytes()[:300]},
        "row 7 is empty": b"",
        "got int": 5,
        "got NoneType": None,
    }
    for message, cell in cases.items():
        with pytest.raises(MediaError, match=message):
            probe(source(cell, name="row 7"))
    cut = source({"path": "cut.jpg", "bytes": half_picture.getvalue()[:3000]})
    assert probe(cut).width == 200
    with pytest.raises(MediaError, match=r"cut\.jpg cannot be decoded"):
        list(iter_frames(cut, [0.0]))


def test_relative_paths_start_from_the_root_and_do_not_leave_it(clip: Path) -> None:
    assert probe(source("clip.mp4", root=clip.parent)).width == WIDTH
    with pytest.raises(MediaError, match="leaves its root"):
        source("../clip.mp4", root=clip.parent / "inner")
    with pytest.raises(MediaError, match="`root`"):
        source("clip.mp4")
    (clip.parent / "inner").mkdir()
    (clip.parent / "inner" / "link.mp4").symlink_to(clip)  # as in the hub's cache
    assert probe(source("sub/../link.mp4", root=clip.parent / "inner")).width == WIDTH
    for path, message in (("inner", "not a file"), ("cl\0p", "cannot be reached"), ("inner/../../x", "leaves its")):
        with pytest.raises(MediaError, match=message):
            source(path, root=clip.parent)


def test_write_video_needs_even_frames_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    for frames in ([], [np.zeros((5, 4, 3), np.uint8)]):
        with pytest.raises(MediaError, match="even height"):
            write_video(tmp_path / "clip.mp4", frames, fps=8)

    def breaks_off():
        yield np.zeros((4, 4, 3), np.uint8)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write_video(tmp_path / "clip.mp4", breaks_off(), fps=8)
    assert not (tmp_path / "clip.mp4").exists()
