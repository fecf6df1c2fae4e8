"""Measures of a rendered clip: which colour and shape it shows, and where that moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .media import COLORS, DIRECTIONS, SHAPES

_CONTRAST = 60.0
"""Distance of levels from the background's, from 0 to 441, from which a pixel belongs to a shape."""
_FEWEST, _MOST = 0.02, 0.5
"""Shares of a frame's pixels that a shape covers at least and at most."""
_BRIGHT = 95.0
"""Mean level of a background from which it is a bright one: half way between those of the demo and of its pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a clip shows.

    Attributes:
        color (`str`, *optional*): The name in the demo's captions nearest to the mean colour of the shape.
        shape (`str`, *optional*): The shape in the demo's captions nearest to what the middle frame shows.
        overlap (`float`): Intersection over union with that shape, from 0 to 1.
        direction (`str`, *optional*): Where the shape moves from the first to the last frame.
        distance (`float`): How far it moves that way, as a share of the frame's height or width.
        background (`"dark"` or `"bright"`, *optional*): What it moves before.
    """

    color: str | None = None
    shape: str | None = None
    overlap: float = 0.0
    direction: str | None = None
    distance: float = 0.0
    background: str | None = None

    def agrees(self, prompt: str) -> bool:
        """Return whether a prompt in the demo's style names this colour, shape, direction and background."""
        return {self.color, self.shape, self.direction, self.background} <= set(prompt.split())

    def __str__(self) -> str:
        if self.color is None:
            return "no shape"
        if self.direction is None:
            what = "in few frames or at rest"
        else:
            what = f"moving {self.direction} by {self.distance:.0%}"
        return f"a {self.color} {self.shape} (overlap {self.overlap:.0%}) {what} on a {self.background} background"


def look_at(frames: npt.NDArray[np.uint8]) -> Seen:
    """Measure colour, shape and direction in a clip of one shape before a background whose levels form a plane.

    Args:
        frames (`np.ndarray` of shape `(frames, height, width, 3)`): RGB levels from 0 to 255.

    Returns:
        [`Seen`]: Without a colour if no frame, or the middle one, has a shape; without a direction if it moves less
        than a tenth of the frame, or if the first or the last frame has none.
    """
    levels = frames.astype(np.float32)
    backgrounds = np.stack([_background(picture) for picture in levels])
    masks = np.linalg.norm(levels - backgrounds, axis=-1) > _CONTRAST
    middle = masks[len(masks) // 2]
    if not _FEWEST <= middle.mean() <= _MOST:
        return Seen()
    color = np.median(levels[len(masks) // 2][middle], axis=0)
    name = min(COLORS, key=lambda known: float(np.linalg.norm(color - np.array(COLORS[known]))))
    overlaps = {shape: _overlap(middle, shape) for shape in SHAPES}
    shape = max(overlaps, key=lambda known: overlaps[known])
    direction, distance = _motion(masks)
    return Seen(
        color=name,
        shape=shape,
        overlap=overlaps[shape],
        direction=direction,
        distance=distance,
        background="bright" if backgrounds.mean() >= _BRIGHT else "dark",
    )


def _background(picture: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Fit a plane to the levels of a picture `(height, width, 3)`, but for the pixels farthest from it."""
    rows, columns = (np.asarray(index, np.float32).ravel() for index in np.indices(picture.shape[:2]))
    places, levels = np.stack([np.ones_like(rows), rows, columns], axis=1), picture.reshape(-1, 3)
    kept = np.ones(len(levels), np.bool_)
    for _ in range(8):
        plane = places @ np.linalg.lstsq(places[kept], levels[kept], rcond=None)[0]
        distances = np.linalg.norm(levels - plane, axis=1)
        kept = distances <= np.quantile(distances, 0.6)
    return np.asarray(plane.reshape(picture.shape), np.float32)


def _overlap(mask: npt.NDArray[np.bool_], shape: str) -> float:
    """Return the intersection over union of a mask and a shape at its centre that covers as many pixels."""
    rows, columns = (np.asarray(index, np.float32) for index in np.indices(mask.shape))
    y, x = (float(index[mask].mean()) for index in (rows, columns))
    dy, dx = np.abs(rows - y), np.abs(columns - x)
    candidates = (SHAPES[shape](dy, dx, radius) for radius in np.arange(1.0, max(mask.shape)))
    best = min(candidates, key=lambda inside: abs(int(inside.sum()) - int(mask.sum())))
    return float((best & mask).sum() / (best | mask).sum())


def _motion(masks: npt.NDArray[np.bool_]) -> tuple[str | None, float]:
    """Return the direction in which the centre of masks `(frames, height, width)` moves, and how far."""
    if len(masks) < 2 or min(masks[0].mean(), masks[-1].mean()) < _FEWEST / 2:
        return None, 0.0
    first, last = (np.array([index.mean() for index in mask.nonzero()]) / mask.shape for mask in masks[[0, -1]])
    moved = {name: float(np.dot(last - first, step)) for name, step in DIRECTIONS.items()}
    direction = max(moved, key=lambda name: moved[name])
    return (direction, moved[direction]) if moved[direction] >= 0.1 else (None, 0.0)
