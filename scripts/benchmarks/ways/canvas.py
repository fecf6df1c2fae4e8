"""What the panels of the picture are made of: text, frames, stacks and strips of frames, hatched boxes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from hf_bucketing import Size

from .clips import SPEC, Frame

PAPER, INK, QUIET, BAD, GOOD = "#ffffff", "#1b1f24", "#57606a", "#b5340a", "#0b5cad"
HATCH, HATCHED_PAPER = "#d98b73", "#fbeee9"
HEADING, TEXT = 38, 30
CARD = 4
"""Pixels between the frames of a stack."""


class Box(NamedTuple):
    """A place in the picture, in pixels."""

    left: float
    top: float
    width: float
    height: float

    @property
    def corners(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom in whole pixels; the last two lie outside."""
        left, top = round(self.left), round(self.top)
        return left, top, left + round(self.width), top + round(self.height)


class Canvas:
    """A picture that is drawn piece by piece."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width, height), PAPER)
        self.draw = ImageDraw.Draw(self.image)

    def write(
        self, place: tuple[float, float], text: str, *, size: int = TEXT, bold: bool = False, color: str = INK
    ) -> float:
        """Write text whose top left corner is at `place`, and return its width."""
        style = font_manager.FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
        font = ImageFont.truetype(font_manager.findfont(style), size)
        self.draw.text(place, text, fill=color, font=font, anchor="la")
        return font.getlength(text)

    def paste(self, frame: Image.Image, box: Box, *, outline: str = INK, width: int = 1) -> None:
        """Draw a frame into a box, with an outline."""
        left, top, right, bottom = box.corners
        self.image.paste(frame.resize((right - left, bottom - top), Image.Resampling.LANCZOS), (left, top))
        self.draw.rectangle((left, top, right - 1, bottom - 1), outline=outline, width=width)

    def stack(self, frames: Sequence[Frame], box: Box) -> None:
        """Draw a clip as a stack of frames: the first one in the box, later ones behind it."""
        cards = depth_of(frames)
        for card in reversed(range(cards)):
            shown = Image.fromarray(spread(frames, cards)[card])
            self.paste(shown, box._replace(left=box.left + CARD * card, top=box.top - CARD * card))

    def film(self, frames: Sequence[Frame], box: Box) -> None:
        """Draw a clip as a strip of its frames of latents; the edges of frames are drawn out to fill the box."""
        count = SPEC.grid(Size(len(frames), *frames[0].shape[:2]))[0]
        top, height = round(box.top), round(box.height)
        edges = np.linspace(box.left, box.left + box.width, count + 1).round().astype(int).tolist()
        for (left, right), pixels in zip(pairwise(edges), spread(frames, count), strict=True):
            frame = Image.fromarray(pixels)
            scale = min((right - left) / frame.width, height / frame.height)
            shown = frame.resize((round(frame.width * scale), round(frame.height * scale)), Image.Resampling.LANCZOS)
            ground = height - shown.height
            around = Image.new("RGB", (right - left, height), shown.getpixel((0, 0)))
            around.paste(shown.crop((0, 0, 1, shown.height)).resize((right - left, shown.height)), (0, ground))
            around.paste(shown, ((right - left - shown.width) // 2, ground))
            self.image.paste(around, (left, top))
            self.draw.line((left, top, left, top + height - 1), fill=INK)
        self.draw.rectangle((edges[0], top, edges[-1] - 1, top + height - 1), outline=INK, width=2)

    def hatch(self, box: Box, *, paper: str | None = HATCHED_PAPER) -> None:
        """Hatch a box, over paper or over what is drawn there: nothing of it is used."""
        tile = self.image.crop(box.corners)
        draw = ImageDraw.Draw(tile)
        if paper is not None:
            draw.rectangle((0, 0, *tile.size), fill=paper)
        for start in range(-tile.height, tile.width, 10):
            draw.line((start, tile.height, start + tile.height, 0), fill=HATCH, width=2)
        self.image.paste(tile, box.corners)


def depth_of(frames: Sequence[Frame]) -> int:
    """Return how many frames of a clip its stack shows."""
    return 1 + (len(frames) - 1) // 6


def spread(frames: Sequence[Frame], count: int) -> list[Frame]:
    """Return frames of a clip from the first to the last."""
    return [frames[round(position)] for position in np.linspace(0, len(frames) - 1, count)]
