"""Open image files with Pillow; every fault of a file is a `MediaError`."""

from __future__ import annotations

import importlib
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from ..buckets.sizes import CropBox
from ..errors import MediaError
from .containers import container_of, is_heif
from .source import MediaSource
from .views import WHITE

_OPAQUE = 128
"""Least opacity, of 255, of the pixels whose colours tell whether a mask has one colour."""

_SAME_COLOUR = 8
"""Levels by which these colours may differ, as lossy files and small opacities round them."""

_FORMATS = (
    "AVIF",
    "BMP",
    "DDS",
    "DIB",
    "GIF",
    "ICO",
    "JPEG",
    "JPEG2000",
    "PCX",
    "PNG",
    "PPM",
    "PSD",
    "QOI",
    "SGI",
    "TGA",
    "TIFF",
    "WEBP",
    "XBM",
    "XPM",
)
"""Formats that Pillow reads by itself; others start programs (EPS, Ghostscript), or can only be recognised."""

_ANIMATED = {"GIF", "PNG", "WEBP", "AVIF"}
"""Formats whose frames are shown one after the other, unlike those of TIFF and MPO."""
_TRANSPOSED = {5, 6, 7, 8}  # EXIF orientations that swap width and height
_BOMBS = Image.DecompressionBombError, Image.DecompressionBombWarning  # the second where warnings are errors
_MALFORMED = SyntaxError, TypeError, LookupError, ArithmeticError, ValueError, RuntimeError, struct.error, zlib.error
_PILLOW_ERRORS = (OSError, EOFError, AssertionError, AttributeError, *_MALFORMED, *_BOMBS)


@contextmanager
def open_image(source: MediaSource) -> Iterator[ImageFile.ImageFile | None]:
    """Open an image for a `with` block without decoding it; yield `None` for a file that is not an image."""
    try:
        with source.open_binary() as file:
            head = file.read(12)
            if container_of(head) is not None:
                yield None
                return
            file.seek(0)
            image: ImageFile.ImageFile | None
            try:
                image = Image.open(file, formats=_readable_formats())
            except UnidentifiedImageError:
                file.seek(0)
                image = _open_heif(file) if is_heif(head) else None
            if image is None:
                yield None
                return
            _check_still(image, source)
            yield image
    except MediaError:
        raise
    except _PILLOW_ERRORS as error:
        raise MediaError(
            f"{source.path} cannot be decoded ({error}); the image may be corrupt or cut off. Remove the row or write "
            "the file again."
        ) from error


@lru_cache(maxsize=1)
def _readable_formats() -> tuple[str, ...]:
    """Return which of the formats this release of Pillow reads."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _open_heif(file: BinaryIO) -> ImageFile.ImageFile | None:
    """Open a HEIF picture with pillow-heif; return None where it is not installed, or its library does not load."""
    try:
        image: ImageFile.ImageFile = importlib.import_module("pillow_heif").HeifImageFile(file)
    except ImportError:  # which pillow-heif raises when it is called, if its library does not load
        return None
    return image


def is_image(source: MediaSource) -> bool:
    """Return whether a file is an image; all others count as videos."""
    with open_image(source) as image:
        return image is not None


def cropped_part(
    frame: npt.NDArray[np.uint8],
    size: tuple[int, int],
    resized: tuple[int, int],
    box: CropBox,
    *,
    resample: Image.Resampling = Image.Resampling.BICUBIC,
) -> npt.NDArray[np.uint8]:
    """Resize to `(height, width)` the part of a frame that a crop of its sample, `resized` as a whole, shows."""
    height, width = frame.shape[:2]
    across, down = width / resized[1], height / resized[0]
    right, bottom = min(width, (box.left + box.width) * across), min(height, (box.top + box.height) * down)
    image = Image.fromarray(frame).resize(size[::-1], resample, box=(box.left * across, box.top * down, right, bottom))
    return np.array(image)


def _check_still(image: ImageFile.ImageFile, source: MediaSource) -> None:
    """Raise `MediaError` for an animation, or for pixels of unknown range."""
    if image.format in _ANIMATED and getattr(image, "is_animated", False):
        frames = getattr(image, "n_frames", "several")
        raise MediaError(
            f"{source.path} is an animation ({image.format}, {frames} frames), which is not supported as image or "
            "video; convert it, for example with ffmpeg to mp4, or remove the row."
        )
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise MediaError(
            f"{source.path} holds grey values of 32 bits ({image.mode}), whose range is not known; write it with 8 or "
            "16 bits, or remove the row."
        )


def rgb_array(image: Image.Image, *, background: str | None = WHITE) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image, of shape `(height, width, 3)`; 16-bit grey becomes 8 bits per colour.

    Transparent parts are laid on a colour; None stands for a mask, see [`laid_on`].
    """
    if not image.mode.startswith("I"):
        transparent = image.has_transparency_data
        pixels = np.array(image.convert("RGBA" if transparent else "RGB"))
        return laid_on(pixels, background) if transparent else pixels
    grey = np.asarray(image).astype(np.uint32)  # 16-bit PNG, which Pillow would clip at 255
    pixels = np.repeat(((grey + 128) // 257).astype(np.uint8)[..., None], 3, axis=2)
    if (clear := image.info.get("transparency")) is None:
        return pixels
    opacity = np.where(grey == clear, 0, 255).astype(np.uint8)
    return laid_on(np.dstack([pixels, opacity]), background)


def laid_on(pixels: npt.NDArray[np.uint8], background: str | None) -> npt.NDArray[np.uint8]:
    """Lay pixels `(height, width, 4)` with opacity on a colour, or read a mask of them, to `(height, width, 3)`.

    Transparent parts of a mask are black. Where its opaque pixels have one colour, the mask is its opacity: a person
    who cuts out a mask leaves its shape there.

    Args:
        pixels (`uint8` array of shape `(height, width, 4)`): Red, green, blue and opacity.
        background (`str`, *optional*): Colour; None for a mask.

    Example:
        >>> laid_on(np.array([[[255, 0, 0, 255], [0, 0, 9, 0]]], np.uint8), "white").tolist()
        [[[255, 0, 0], [255, 255, 255]]]
        >>> laid_on(np.array([[[0, 0, 0, 255], [0, 0, 0, 0]]], np.uint8), None).tolist()
        [[[255, 255, 255], [0, 0, 0]]]
    """
    colours, opacity = pixels[..., :3], pixels[..., 3:]
    if background is None:
        shape = colours[opacity[..., 0] >= _OPAQUE]
        if len(shape) and np.ptp(shape, axis=0).max() <= _SAME_COLOUR and np.ptp(opacity) > 0:
            return np.repeat(opacity, 3, axis=2)
        background = "black"
    picture = Image.fromarray(pixels)
    laid = Image.new("RGB", picture.size, background)
    laid.paste(picture, mask=picture)
    return np.array(laid)


def upright_size(image: ImageFile.ImageFile) -> tuple[int, int]:
    """Return the width and height as shown of an image that is opened but not decoded."""
    width, height = image.size
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # only some versions of Pillow rotate its size
        width, height = (int(image.tag_v2[tag]) for tag in (ExifTags.Base.ImageWidth, ExifTags.Base.ImageLength))
    return (height, width) if exif_orientation(image) in _TRANSPOSED else (width, height)


def exif_orientation(image: ImageFile.ImageFile) -> int:
    """Return the EXIF orientation, from 1 to 8, of an image that is opened but not decoded."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # getexif would decode the whole image, since PNG may store EXIF after the pixels
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))
