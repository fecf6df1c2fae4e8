"""Turn decoded frames into the RGB of a display of BT.709, as players show them.

FFmpeg's conversion follows the tags of a frame: its matrix and its range. Two things it leaves out. A video without
tags is BT.709 from the sizes of high definition on, as in mpv (`mp_csp_guess_colorspace` in video/csputils.c), while
swscale takes BT.601. HDR (PQ and HLG, ITU-R BT.2100) and the primaries of BT.2020 are mapped to SDR here, because the
FFmpeg of PyAV has neither zscale nor libplacebo, and its swscale takes seconds for a table and clips highlights.

The mapping is a fixed function of a pixel: absolute light, of HLG on a display of 1000 nits; the roll-off of ITU-R
BT.2390 (section 5.4.1), from 1000 nits to a white of 203 nits, the reference white of BT.2408, which itself becomes
about 231 of 255; the matrix of BT.2087; and the inverse of BT.1886.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import av
import numpy as np
import numpy.typing as npt
from av.video.codeccontext import VideoCodecContext
from av.video.format import VideoFormat
from av.video.reformatter import VideoReformatter

_UNSPECIFIED, _BT709, _BT601, _BT2020 = 2, 1, 6, 9
_PQ, _HLG = 16, 18
_LIMITED, _FULL = 1, 2
"""Code points of ITU-T H.273, as FFmpeg has them; ranges are FFmpeg's."""

_MATRICES = {_BT709: 1, 4: 4, 5: 5, _BT601: 5, 7: 7, _BT2020: 9, 10: 9}
"""Swscale's number of each matrix that it knows."""

_PEAK, _WHITE = 1000.0, 203.0
"""Nits of the HDR light at which the roll-off ends, and of SDR white."""

_GAMMA = 2.4
_STEPS = 2**16
_LUMINANCE = np.array([0.2627, 0.6780, 0.0593], np.float32)
_BT2020_TO_BT709 = np.array(
    [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]], np.float32
)
_BT601_TO_BT709 = np.array(
    [[1.0864, -0.0723, -0.0141], [0.0965, 0.8451, 0.0584], [-0.0141, -0.0277, 1.0418]], np.float32
)
"""Turns the RGB that the matrix of BT.601 made of a pixel into the RGB that the matrix of BT.709 makes of it."""

_Floats = npt.NDArray[np.float32]


class Colours(NamedTuple):
    """Tags of a video, by the code points of ITU-T H.273; 2 where they are not known.

    Attributes:
        transfer (`int`): Transfer characteristics.
        primaries (`int`): Colour primaries.
    """

    transfer: int
    primaries: int

    @classmethod
    def of(cls, context: VideoCodecContext) -> Colours:
        """Read the tags of a stream."""
        return cls(int(context.color_trc), int(context.color_primaries))

    @property
    def hdr(self) -> bool:
        """Whether light is absolute, or above white."""
        return self.transfer in (_PQ, _HLG)

    @property
    def mapped(self) -> bool:
        """Whether pixels are mapped to SDR of BT.709."""
        return self.hdr or self.primaries == _BT2020


def is_untagged_hd(video: av.VideoFrame | VideoCodecContext) -> bool:
    """Return whether a video, or a frame of it, names no matrix and is large enough to be taken for BT.709."""
    is_rgb = video.format is not None and video.format.is_rgb
    return not is_rgb and video.colorspace == _UNSPECIFIED and (video.width >= 1280 or video.height > 576)


def with_opacity(frame_format: VideoFormat) -> bool:
    """Return whether pixels of a format have an opacity beside their colours."""
    return any(component.is_alpha for component in frame_format.components)


def rgb_pixels(frame: av.VideoFrame, colours: Colours, *, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Convert a frame to RGB of BT.709, stretched to a size.

    Args:
        frame (`av.VideoFrame`): A decoded frame.
        colours ([`Colours`]): Tags of its video.
        size (`tuple[int, int]`): Width and height of the result in pixels.

    Returns:
        `uint8` array of shape `(height, width, 3)`; of frames with an opacity `(height, width, 4)`.
    """
    shape: dict[str, Any] = {"width": size[0], "height": size[1], "interpolation": "BICUBIC"}
    changes = {} if (frame.width, frame.height) == size else shape
    matrix = _MATRICES.get(_matrix(frame, colours))
    if matrix is not None and not frame.format.is_rgb:
        full = frame.color_range == _FULL or frame.format.name.startswith("yuvj")
        # PyAV before 17 takes BT.601 and the limited range, unless all four are named.
        changes |= {"src_colorspace": matrix, "src_color_range": _FULL if full else _LIMITED}
        changes |= {"dst_colorspace": _MATRICES[_BT601], "dst_color_range": _FULL}
    # PyAV 19 keeps the threads of `frame.reformat` alive, which a forked process then waits for forever.
    opacity = with_opacity(frame.format)
    form = ("rgba64le" if opacity else "rgb48le") if colours.mapped else ("rgba" if opacity else "rgb24")
    pixels: npt.NDArray[Any] = VideoReformatter().reformat(frame, format=form, **changes).to_ndarray()
    if not colours.mapped:
        return pixels
    rest = (pixels[..., 3:] >> 8).astype(np.uint8)
    return np.concatenate([_to_sdr(pixels[..., :3], colours), rest], axis=-1)


def _matrix(frame: av.VideoFrame, colours: Colours) -> int:
    """Return the matrix of a frame; unspecified for small ones without tags, which swscale takes for BT.601."""
    if frame.colorspace == _UNSPECIFIED and colours.mapped:
        return _BT2020
    if is_untagged_hd(frame):
        return _BT709
    return int(frame.colorspace)


def corrected_to_bt709(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return RGB `(height, width, 3)` that was made with the matrix of BT.601, as that of BT.709 makes it.

    What BT.601 clipped stays lost: pure green is 37 levels too dark.
    """
    return (pixels @ _BT601_TO_BT709.T).round().clip(0, 255).astype(np.uint8)


def _to_sdr(pixels: npt.NDArray[np.uint16], colours: Colours) -> npt.NDArray[np.uint8]:
    """Map RGB of 16 bits to SDR of BT.709; 1.0 is SDR white from the first step on."""
    light = _light(colours.transfer)[pixels]
    if colours.transfer == _HLG:
        luminance = light @ _LUMINANCE
        light *= (_PEAK / _WHITE) * (luminance ** np.float32(0.2))[..., None]  # the gamma of 1.2 of a display
    if colours.hdr:
        brightest = light.max(-1, keepdims=True)
        rolled_off = _roll_off()[_places(brightest * np.float32(_WHITE / _PEAK))]
        light *= rolled_off / np.maximum(brightest, np.float32(1e-6))
    if colours.primaries in (_BT2020, _UNSPECIFIED):
        light = light @ _BT2020_TO_BT709.T
    return _encoded()[_places(light)]


def _places(values: _Floats) -> npt.NDArray[np.uint16]:
    """Return the steps of tables over the fourth root of [0, 1], which has more of them for dark pixels."""
    return (np.sqrt(np.sqrt(values.clip(0, 1))) * np.float32(_STEPS - 1) + np.float32(0.5)).astype(np.uint16)


def _steps() -> npt.NDArray[np.float64]:
    return np.linspace(0, 1, _STEPS)


@lru_cache
def _light(transfer: int) -> _Floats:
    """Return the light of each code value: 1.0 is SDR white; of HLG, that of the scene, up to 1."""
    if transfer == _PQ:
        return (_pq_light(_steps()) / _WHITE).astype(np.float32)
    if transfer == _HLG:
        a, b, c = 0.17883277, 0.28466892, 0.55991073  # BT.2100, table 5
        signal = _steps()
        return np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12).astype(np.float32)
    return (_steps() ** _GAMMA).astype(np.float32)


@lru_cache
def _roll_off() -> _Floats:
    """Return the light, 1.0 at SDR white, that HDR light of up to 1000 nits becomes, by BT.2390."""
    signal = _pq_signal(_steps() ** 4 * _PEAK) / _pq_signal(_PEAK)
    most = _pq_signal(_WHITE) / _pq_signal(_PEAK)
    knee = 1.5 * most - 0.5
    t = (signal - knee) / (1 - knee)
    bent = (2 * t**3 - 3 * t**2 + 1) * knee + (t**3 - 2 * t**2 + t) * (1 - knee) + (3 * t**2 - 2 * t**3) * most
    return (_pq_light(np.where(signal < knee, signal, bent) * _pq_signal(_PEAK)) / _WHITE).astype(np.float32)


@lru_cache
def _encoded() -> npt.NDArray[np.uint8]:
    """Return the level of light from 0 to SDR white."""
    return (255 * _steps() ** (4 / _GAMMA)).round().astype(np.uint8)


_M1, _M2, _C1, _C2, _C3 = 2610 / 16384, 2523 / 32, 3424 / 4096, 2413 / 128, 2392 / 128  # BT.2100, table 4


def _pq_light(signal: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the nits of a PQ signal in [0, 1]."""
    root = signal ** (1 / _M2)
    return 10_000 * (np.maximum(root - _C1, 0) / (_C2 - _C3 * root)) ** (1 / _M1)


def _pq_signal(nits: Any) -> Any:
    """Return the PQ signal of nits."""
    power = (np.asarray(nits) / 10_000) ** _M1
    return ((_C1 + _C2 * power) / (1 + _C3 * power)) ** _M2
