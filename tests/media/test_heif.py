"""HEIC, AVIF and JPEG XL: the whole picture, upright, or a message while its data set is prepared."""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from hf_bucketing import MediaError
from hf_bucketing.media import MediaInfo, MediaSource, iter_frames, probe, write_video
from hf_bucketing.media.images import is_image
from tests.media.heif import blocks, save_heic, save_tiles
from tests.media.test_media import numbered_frames, numbers

JPEG_XL = base64.b64decode("/wrBBwATiAIAxAC1nyAAABUqo4wbvJzr+fJDh8W0jesMbbVtYQljs70wSEg4Q/WiBvfmWchh22KYQyUJ")
"""A JPEG XL picture of 16×8 pixels, as libjxl writes it."""


def source(path: Path) -> MediaSource:
    return MediaSource.from_cell(str(path))


def difference(path: Path, picture: Image.Image, **options) -> float:
    """Return the mean difference in levels between a file's frame and a picture of its size."""
    (frame,) = iter_frames(source(path), [0.0], **options)
    assert frame.shape == (picture.height, picture.width, 3)
    return float(abs(frame.astype(int) - np.asarray(picture)).mean())


@pytest.fixture
def without_pillow_heif(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)


@pytest.mark.parametrize("ending", ["heic", "avif"])
def test_a_picture_of_tiles_is_whole_and_upright(tmp_path: Path, ending: str) -> None:
    picture = blocks(184, 100)  # its tiles cover 192×128 pixels
    save_tiles(tmp_path / f"tiles.{ending}", picture, rows=2, columns=3)
    save_tiles(tmp_path / f"turned.{ending}", picture, rows=2, columns=3, quarter_turns=3)
    turned = picture.transpose(Image.Transpose.ROTATE_270)
    for name, shown in (("tiles", picture), ("turned", turned)):
        path = tmp_path / f"{name}.{ending}"
        assert probe(source(path)) == MediaInfo(*shown.size, 1, 0.0)
        assert is_image(source(path))
        assert difference(path, shown) < 6


def test_pictures_of_one_item_are_read_with_and_without_pillow_heif(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = blocks(96, 64)
    save_heic(tmp_path / "single.heic", picture)
    save_heic(tmp_path / "small.heic", picture, thumbnail=True)
    save_heic(tmp_path / "two.heic", picture, blocks(64, 96, seed=2))
    paths = sorted(tmp_path.iterdir())
    for path in paths:
        assert probe(source(path)) == MediaInfo(96, 64, 1, 0.0)
        assert difference(path, picture) < 3
    # A row that was prepared without pillow-heif, where PyAV names a rate, is read with it, and the reverse.
    assert difference(paths[0], picture, row=MediaInfo(96, 64, 1, 1.0)) < 3
    with pytest.raises(MediaError, match="replaced"):
        difference(paths[0], picture, row=MediaInfo(96, 64, 5, 8.0))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for path in paths:
        assert probe(source(path))[:3] == (96, 64, 1)
        assert difference(path, picture) < 3
    assert difference(paths[0], picture, row=MediaInfo(96, 64, 1, 0.0)) < 3


def test_without_pillow_heif_what_pyav_shows_in_parts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = blocks(96, 64)
    save_tiles(tmp_path / "tiles.heic", picture, rows=1, columns=2)
    save_tiles(tmp_path / "turned.heic", picture, rows=1, columns=2, quarter_turns=1)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.info["exif"] = exif.tobytes()
    save_heic(tmp_path / "single.heic", picture)
    save_heic(tmp_path / "cropped.heic", blocks(33, 25))  # an encoder pads it
    clear = blocks(96, 64)
    clear.putalpha(100)
    save_heic(tmp_path / "clear.heic", clear)
    content = bytearray((tmp_path / "tiles.heic").read_bytes())
    content[8:12] = b"isom"  # a brand of videos
    (tmp_path / "video.heic").write_bytes(content)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for name, reason in {
        "tiles": "consists of 2 tiles", "turned": "consists of 2 tiles and is turned", "video": "consists of 2 tiles",
        "single": "is turned", "cropped": "is cropped", "clear": "has a plane beside its colours",
    }.items():  # fmt: skip
        with pytest.raises(MediaError, match=rf"{name}\.heic is a picture that {reason}, .*hf_bucketing\[heic\]"):
            probe(source(tmp_path / f"{name}.heic"))


def test_a_broken_library_counts_as_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiles(tmp_path / "tiles.heic", blocks(96, 64), rows=1, columns=2)
    (tmp_path / "pillow_heif.py").write_text(
        "class HeifImageFile:\n    def __init__(self, file):\n        raise ImportError('libheif.so.1')\n"
    )
    monkeypatch.delitem(sys.modules, "pillow_heif")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MediaError, match="Install pillow-heif"):
        probe(source(tmp_path / "tiles.heic"))


def test_a_corrupt_heic_and_a_jpeg_xl_picture_are_named(tmp_path: Path) -> None:
    save_heic(tmp_path / "cut.heic", blocks(96, 64))
    content = (tmp_path / "cut.heic").read_bytes()
    (tmp_path / "cut.heic").write_bytes(content[: len(content) // 4])
    (tmp_path / "picture.jxl").write_bytes(JPEG_XL)
    for name, message in {"cut.heic": "corrupt", "picture.jxl": "is a JPEG XL picture.*djxl"}.items():
        with pytest.raises(MediaError, match=message):
            probe(source(tmp_path / name))


def test_of_several_video_streams_the_default_one_is_shown(tmp_path: Path) -> None:
    for name, default in (("first.mkv", 0), ("second.mkv", 1), ("none.mkv", None)):
        with av.open(str(tmp_path / name), "w") as container:
            sizes = [{"width": 80 - 16 * number, "height": 48} for number in range(2)]
            streams = [container.add_stream("mpeg4", rate=8, **size) for size in sizes]
            for number, stream in enumerate(streams):
                stream.disposition = int(number == default)
            for number, stream in enumerate(streams):
                frame = np.full((48, stream.width, 3), 20 + 5 * number, np.uint8)
                for packet in [
                    *stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")),
                    *stream.encode(None),
                ]:
                    container.mux(packet)
        shown = default or 0
        assert probe(source(tmp_path / name)).width == 80 - 16 * shown
        assert numbers(iter_frames(source(tmp_path / name), [0.0])) == [shown]


def test_a_picture_with_a_video_behind_it_is_the_picture(tmp_path: Path) -> None:
    """As motion photographs are: JPEG or HEIC, and an mp4 after its end."""
    write_video(tmp_path / "clip.mp4", numbered_frames(4), fps=12)
    picture = blocks(96, 64)
    save_heic(tmp_path / "motion.heic", picture)
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=95)
    (tmp_path / "motion.jpg").write_bytes(jpeg.getvalue() + (tmp_path / "clip.mp4").read_bytes())
    heic = (tmp_path / "motion.heic").read_bytes()
    clip = (tmp_path / "clip.mp4").read_bytes()
    (tmp_path / "motion.heic").write_bytes(heic + (8 + len(clip)).to_bytes(4, "big") + b"mpvd" + clip)
    for name in ("motion.jpg", "motion.heic"):
        assert difference(tmp_path / name, picture) < 5
