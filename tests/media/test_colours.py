"""Colours of videos: those of known pixels, by tags and without, and HDR as SDR."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from hf_bucketing.media import MediaSource, iter_frames
from hf_bucketing.media.colours import corrected_to_bt709
from hf_bucketing.media.probe import decoding_rules

BARS = np.float64([
    [255, 255, 255], [0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255], [200, 120, 40], [40, 120, 200], [128, 128, 128],
])  # fmt: skip
WEIGHTS = {"bt709": (0.2126, 0.0722), "bt601": (0.299, 0.114), "bt2020": (0.2627, 0.0593)}
"""Shares of red and blue in luma."""

BT709_TO_BT2020 = np.linalg.inv([[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]])


def planes_of(colours: np.ndarray, matrix: str, *, full: bool, bits: int) -> np.ndarray:
    """Return luma and chroma of RGB in [0, 1], `(3, n)`, as ITU-R BT.601, BT.709 and BT.2020 define them."""
    red, blue = WEIGHTS[matrix]
    luma = colours @ [red, 1 - red - blue, blue]
    chroma = [(colours[:, 2] - luma) / (2 - 2 * blue), (colours[:, 0] - luma) / (2 - 2 * red)]
    unit, most = 2 ** (bits - 8), 2**bits - 1
    if full:
        values = [luma * most, *(128 * unit + most * part for part in chroma)]
    else:
        values = [(16 + 219 * luma) * unit, *((128 + 224 * part) * unit for part in chroma)]
    return np.clip(np.round(values), 0, most)


def bars(
    path: Path,
    matrix: str,
    *,
    size=(96, 128),
    colours=BARS / 255,
    full=False,
    pixels="yuv444p",
    codec="libx264",
    **tags,
) -> MediaSource:
    """Write a clip of upright bars without loss, and with no tags but those that are named."""
    bits = 10 if "10" in pixels else 8
    with av.open(str(path), "w") as container:
        lossless = {"libx264": {"qp": "0", "preset": "ultrafast"}, "libvpx-vp9": {"lossless": "1"}, "ffv1": {}}
        stream = container.add_stream(codec, rate=25, options=lossless[codec])
        stream.height, stream.width, stream.pix_fmt = *size, pixels
        for name, code in tags.items():
            setattr(stream.codec_context, name, code)
        frame = av.VideoFrame(size[1], size[0], pixels)
        for name in ("colorspace", "color_range"):
            setattr(frame, name, tags.get(name, int(getattr(frame, name))))
        values = planes_of(colours, matrix, full=full, bits=bits)
        for plane, levels in zip(frame.planes, values, strict=True):
            row = np.repeat(levels.astype(np.uint8 if bits == 8 else np.uint16), plane.width // len(colours))
            rows = np.zeros((plane.height, plane.line_size), np.uint8)
            rows[:, : row.nbytes] = row.view(np.uint8)
            plane.update(rows.tobytes())
        container.mux([*stream.encode(frame), *stream.encode()])
    return MediaSource.from_cell(str(path))


def bar_colours(clip: MediaSource, count: int = len(BARS)) -> np.ndarray:
    """Return the colour in the middle of each bar, `(count, 3)`."""
    (frame,) = iter_frames(clip, [0.0], video_decoder="pyav")
    return frame[frame.shape[0] // 2, frame.shape[1] // (2 * count) :: frame.shape[1] // count].astype(int)


HD, PORTRAIT = (720, 1280), (640, 64)


@pytest.mark.parametrize(("matrix", "settings", "rules"), [
    ("bt709", {"colorspace": 1, "color_range": 1}, []),
    ("bt709", {"colorspace": 1, "color_range": 2, "full": True, "pixels": "yuvj444p"}, []),
    ("bt709", {"colorspace": 1, "color_range": 2, "full": True, "codec": "libvpx-vp9"}, []),
    ("bt601", {"colorspace": 6, "color_range": 1}, []),
    ("bt601", {"colorspace": 5, "color_range": 1, "size": HD}, []),
    ("bt601", {}, []),
    ("bt601", {"full": True, "pixels": "yuvj444p"}, []),
    ("bt709", {"size": HD}, ["BT.709 without tags"]),
    ("bt709", {"size": PORTRAIT}, ["BT.709 without tags"]),
    ("bt709", {"size": HD, "full": True, "pixels": "yuvj444p"}, ["BT.709 without tags"]),
    ("bt709", {"size": HD, "codec": "ffv1"}, ["BT.709 without tags"]),
    ("bt2020", {"colorspace": 9, "color_range": 1}, []),
])  # fmt: skip
def test_known_colours_come_out_by_tags_and_without_by_size(tmp_path: Path, matrix, settings, rules) -> None:
    clip = bars(tmp_path / "bars.mkv", matrix, **settings)
    assert np.abs(bar_colours(clip) - BARS).max() <= 1
    assert decoding_rules(clip) == rules


PQ, HLG = 16, 18


def signal_of(light: np.ndarray, transfer: int) -> np.ndarray:
    """Return the PQ or HLG signal of nits (ITU-R BT.2100; HLG on a display of 1000 nits)."""
    if transfer == PQ:
        power = (light / 10_000) ** (2610 / 16384)
        return ((3424 / 4096 + 2413 / 128 * power) / (1 + 2392 / 128 * power)) ** (2523 / 32)
    luminance = np.maximum(light @ [0.2627, 0.6780, 0.0593], 1e-9)[:, None] / 1000
    scene = light / 1000 * luminance ** (1 / 1.2 - 1)
    bright = 0.17883277 * np.log(np.maximum(12 * scene - 0.28466892, 1e-9)) + 0.55991073
    return np.where(scene <= 1 / 12, np.sqrt(3 * scene), bright)


@pytest.mark.parametrize("transfer", [PQ, HLG])
def test_hdr_becomes_sdr_with_white_and_colours_where_they_are_seen(tmp_path: Path, transfer: int) -> None:
    # White of 203 nits, the brightest light, black, then 20 nits of grey, and of red, green and blue of BT.709.
    bright = np.float64([[203] * 3, [1000] * 3, [0] * 3, [20] * 3, [20, 0, 0], [0, 20, 0], [0, 0, 20], [50, 20, 10]])
    signal = signal_of(np.maximum(bright @ BT709_TO_BT2020.T, 0), transfer)
    tags = {"colorspace": 9, "color_range": 1, "color_trc": transfer, "color_primaries": 9}
    clip = bars(tmp_path / "hdr.mkv", "bt2020", colours=signal, pixels="yuv420p10le", codec="ffv1", **tags)
    assert decoding_rules(clip) == ["mapped to SDR"]
    found = bar_colours(clip)
    assert np.abs(found[0] - 231).max() <= 2
    assert found[1].min() >= 253
    assert found[2].max() <= 1
    dim = 255 * (bright[3:] / 203) ** (1 / 2.4)
    assert np.abs(found[3:] - dim).max() <= 8, "light below the knee keeps its colours"
    assert np.abs(found[3] - dim[0]).max() <= 2
    again = bar_colours(clip)
    assert np.array_equal(found, again)


def test_bt2020_without_hdr_keeps_its_light_in_the_primaries_of_bt709(tmp_path: Path) -> None:
    light = np.float64([[1, 1, 1], [0.5, 0.5, 0.5], [0.6, 0.2, 0.1], [0.1, 0.3, 0.6]])
    wide = (light @ BT709_TO_BT2020.T) ** (1 / 2.4)
    tags = {"colorspace": 9, "color_range": 1, "color_trc": 14, "color_primaries": 9}
    clip = bars(tmp_path / "wide.mkv", "bt2020", colours=wide, pixels="yuv420p10le", codec="ffv1", **tags)
    assert np.abs(bar_colours(clip, len(light)) - 255 * light ** (1 / 2.4)).max() <= 2
    assert decoding_rules(clip) == ["mapped to SDR"]


def test_rgb_made_with_the_matrix_of_bt601_is_corrected(tmp_path: Path) -> None:
    clip = bars(tmp_path / "small.mkv", "bt709")  # small and without tags, so that it is taken for BT.601
    wrong = bar_colours(clip).astype(np.uint8)
    saturated = [2, 3, 4]  # BT.601 clips them
    assert np.abs(np.delete(wrong - BARS, saturated, 0)).max() > 4
    corrected = corrected_to_bt709(wrong[None])[0]
    assert np.abs(np.delete(corrected - BARS, saturated, 0)).max() <= 2
