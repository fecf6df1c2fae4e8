"""Open image files with Pillow, so that whatever is wrong with one is a `MediaError`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from ..errors import MediaError
from .containers import container_of
from .source import MediaSource

_TRANSPOSED = {5, 6, 7, 8}  # EXIF orientations that swap width and height
_PILLOW_ERRORS = (
    *(OSError, ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, EOFError, RuntimeError, struct.error),
    *(Image.DecompressionBombError, Image.DecompressionBombWarning),  # the second where warnings are errors
)


@contextmanager
def open_image(source: MediaSource) -> Iterator[ImageFile.ImageFile | None]:
    """Open an image for a `with` block, or give `None` for a file that is no image; nothing is decoded.

    Raises:
        MediaError: If the image's header is broken, or the block meets an error of Pillow.
    """
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
            yield image
    except MediaError:
        raise
    except _PILLOW_ERRORS as error:
        raise MediaError(
            f"{source.path} cannot be decoded ({error}); the image may be corrupt or cut off. Remove the row or write "
            "the file again."
        ) from error


def upright_size(image: ImageFile.ImageFile) -> tuple[int, int]:
    """Return width and height as shown, of an image that is opened but not decoded."""
    width, height = image.size
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # some versions of Pillow turn its size, others do not
        width, height = (int(image.tag_v2[tag]) for tag in (ExifTags.Base.ImageWidth, ExifTags.Base.ImageLength))
    return (height, width) if exif_orientation(image) in _TRANSPOSED else (width, height)


def exif_orientation(image: ImageFile.ImageFile) -> int:
    """Return the EXIF orientation, 1 to 8, of an image that is opened but not decoded."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # getexif would decode the whole picture, to look behind it
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))
