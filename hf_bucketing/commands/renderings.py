"""Renderings side by side: prompts, seeds, strengths of adapters and steps in a grid, with labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Cell(NamedTuple):
    """One rendering: its prompt, the seed of its noise, the strength of the adapters, and the scheduler's steps."""

    prompt: str
    seed: int
    strength: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderGrid:
    """Every prompt with every seed in a row, every strength with every number of steps in a column.

    Attributes:
        prompts (sequence of `str`): Prompts.
        seeds (sequence of `int`): Seeds of the noise.
        strengths (sequence of `float`): Factors of the strengths of adapters; 0 is the base model.
        steps (sequence of `int`): Scheduler steps.
    """

    prompts: Sequence[str]
    seeds: Sequence[int]
    strengths: Sequence[float]
    steps: Sequence[int]

    @property
    def cells(self) -> list[Cell]:
        """The renderings, row by row."""
        return [Cell(*values) for values in product(self.prompts, self.seeds, self.strengths, self.steps)]

    @property
    def rows(self) -> list[str]:
        """Labels of the rows."""
        several = len(self.seeds) > 1
        pairs = product(self.prompts, self.seeds)
        return [f"seed {seed}: {prompt}" if several else prompt for prompt, seed in pairs]

    @property
    def columns(self) -> list[str]:
        """Labels of the columns.

        Example:
            >>> RenderGrid(prompts=["a"], seeds=[0], strengths=[0.0, 0.5], steps=[20]).columns
            ['base', 'strength 0.5']
            >>> RenderGrid(prompts=["a"], seeds=[0], strengths=[0.0, 1.0], steps=[20, 30]).columns[1]
            'base, 30 steps'
        """
        names = {strength: f"strength {strength:g}" if strength else "base" for strength in self.strengths}
        if len(self.strengths) == 1:
            return [f"{steps} steps" for steps in self.steps]
        if len(self.steps) == 1:
            return [*names.values()]
        return [f"{names[strength]}, {steps} steps" for strength, steps in product(self.strengths, self.steps)]


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
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width * len(labels), _BAND), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(_TEXT)
    for place, label in enumerate(labels):
        text = label
        while text and font.getlength(text) > width - 8:
            text = f"{text[:-2]}…" if len(text) > 2 else ""
        draw.text((place * width + 4, 3), text, fill="black", font=font)
    return np.asarray(image)
