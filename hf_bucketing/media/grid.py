"""Pictures or clips side by side with labels, as one picture or clip."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

_BAND = 24
"""Height of a line of labels in pixels, which is even, as sides of videos are."""
_TEXT = 14


def labelled_grid(
    clips: Sequence[npt.NDArray[np.uint8]], *, rows: Sequence[str], columns: Sequence[str]
) -> npt.NDArray[np.uint8]:
    """Join clips of one shape: those of a row side by side below its label, and labels of the columns on top.

    Args:
        clips (sequence of `uint8` arrays of shape `(frames, height, width, 3)`): Clips, row by row.
        rows (sequence of `str`): Label of each row, shortened to its width.
        columns (sequence of `str`): Label of each column, likewise.

    Returns:
        `uint8` array of shape `(frames, 24 + rows · (24 + height), columns · width, 3)`: The grid.
    """
    frames, _, width, _ = clips[0].shape
    parts = [_band(columns, width)]
    for row, label in enumerate(rows):
        cells = clips[row * len(columns) : (row + 1) * len(columns)]
        parts += [_band([label], width * len(columns)), np.concatenate(cells, axis=2)]
    return np.concatenate([np.broadcast_to(part, (frames, *part.shape[-3:])) for part in parts], axis=1)


def _band(labels: Sequence[str], width: int) -> npt.NDArray[np.uint8]:
    """Return a line of labels, each of which has the same width, as a frame."""
    image = Image.new("RGB", (width * len(labels), _BAND), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(_TEXT)
    for place, label in enumerate(labels):
        text = label
        while text and font.getlength(text) > width - 8:
            text = f"{text[:-2]}…" if len(text) > 2 else ""
        draw.text((place * width + 4, 3), text, fill="black", font=font)
    return np.asarray(image)
