"""Open image files with Pillow; every fault of a file is a `MediaError`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from ..buckets.sizes import CropBox
from ..errors import MediaError
from .containers import container_of
from .source import MediaSource

_ANIMATED = {"GIF", "PNG", "WEBP", "AVIF"}
"""Formats whose frames are shown one after the other, unlike those of TIFF and MPO."""
_TRANSPOSED = {5, 6, 7, 8}  # EXIF orientations that swap width and height
_BOMBS = Image.DecompressionBombError, Image.DecompressionBombWarning  # the second where warnings are errors
_MALFORMED = SyntaxError, TypeError, LookupError, ArithmeticError, ValueError, RuntimeError, struct.error
_PILLOW_ERRORS = (OSError, EOFError, *_MALFORMED, *_BOMBS)


@contextmanager
def open_image(source: MediaSource) -> Iterator[ImageFile.ImageFile | None]:
    """Open an image for a `with` block without decoding it; yield `None` for a file that is not an image."""
    try:
        with source.open_binary() as file:
            if container_of(file.read(12)) is not None:
                yield None
                return
            file.seek(0)
            try:
                image = Image.open(file)
            except UnidentifiedImageError:
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


def is_image(source: MediaSource) -> bool:
    """Return whether a file is an image; all others count as videos."""
    with open_image(source) as image:
        return image is not None


def shown_part(
    frame: npt.NDArray[np.uint8], size: tuple[int, int], resized: tuple[int, int], box: CropBox
) -> npt.NDArray[np.uint8]:
    """Resize to `(height, width)` the part of a frame that a crop of its sample, `resized` as a whole, shows."""
    height, width = frame.shape[:2]
    across, down = width / resized[1], height / resized[0]
    right, bottom = min(width, (box.left + box.width) * across), min(height, (box.top + box.height) * down)
    image = Image.fromarray(frame).resize(
        size[::-1], Image.Resampling.BICUBIC, box=(box.left * across, box.top * down, right, bottom)
    )
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


def rgb_array(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image, of shape `(height, width, 3)`; 16-bit grey becomes 8 bits per colour."""
    if not image.mode.startswith("I"):
        return np.array(image.convert("RGB"))
    grey = np.asarray(image).astype(np.uint32)  # 16-bit PNG, which Pillow would clip at 255
    return np.repeat(((grey + 128) // 257).astype(np.uint8)[..., None], 3, axis=2)


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
