"""Colours on which transparent parts of images are laid."""

from __future__ import annotations

from ..errors import BucketingError

WHITE = "white"
"""Colour on which transparent parts are laid by default."""


def check_colour(name: str, colour: str) -> None:
    """Raise unless a text is a colour without transparency, as Pillow and CSS write it.

    Raises:
        BucketingError: If it is not; the message calls it by `name`.
    """
    if colour == WHITE:
        return

    from PIL import ImageColor

    try:
        known = len(ImageColor.getrgb(colour)) == 3
    except ValueError:
        known = False
    if not known:
        raise BucketingError(f"`{name}` must be a colour, such as white, #808080 or rgb(0,128,0); got {colour!r}.")
