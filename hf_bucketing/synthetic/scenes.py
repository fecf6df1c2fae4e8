"""Generated clips of many kinds, more varied than the demo's, on which the models of the demo were trained."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

from .media import COLORS, DIRECTIONS, SHAPES, Clip, render

Frames = npt.NDArray[np.uint8]
Image32 = npt.NDArray[np.float32]


def demo_clip(clip: Clip, rng: np.random.Generator) -> tuple[Frames, str]:
    """Draw a clip of the demo's kind and its caption.

    Args:
        clip ([`Clip`]): Frames, height and width.
        rng (`np.random.Generator`): Source of the contents.

    Returns:
        Frames of shape `(frames, height, width, 3)`, and the caption.
    """
    shape, color, direction = (str(rng.choice(list(names))) for names in (SHAPES, COLORS, DIRECTIONS))
    frames = render(clip, shape=shape, color=color, direction=direction)
    return np.stack(list(frames)), caption_of(clip, shape=shape, color=color, direction=direction)


def caption_of(clip: Clip, *, shape: str, color: str, direction: str) -> str:
    """Return the caption of a clip, or of an image, in the demo's style."""
    if clip.frames > 1:
        return f"a {color} {shape} moving {direction} on a dark background"
    return f"a picture of a {color} {shape} on a dark background"


def scene(clip: Clip, rng: np.random.Generator) -> Frames:
    """Draw a clip of shapes in any colours that move before a moving background, `(frames, height, width, 3)`.

    The background is plain, a gradient, stripes, or a texture with the spectrum of photographs, dark or bright.
    """
    pan = rng.uniform(-1, 1, 2) * rng.choice([0.0, 2.0]) * clip.frames / 9
    margin = int(np.ceil(np.abs(pan).max() * max(clip.frames, 2))) + 1 if pan.any() else 0
    canvas = _background(clip.height + 2 * margin, clip.width + 2 * margin, rng)
    rows, columns = np.indices((clip.height, clip.width), dtype=np.float32)
    shapes = [_Mover(clip, rng) for _ in range(rng.integers(0, 4))]
    frames = []
    for frame in range(clip.frames):
        top, left = (margin + round(step * (frame - clip.frames / 2)) for step in pan)
        picture = canvas[max(top, 0) : max(top, 0) + clip.height, max(left, 0) : max(left, 0) + clip.width].copy()
        for shape in shapes:
            shape.paint(picture, rows, columns, frame)
        frames.append(picture.clip(0, 255).astype(np.uint8))
    return np.stack(frames)


class _Mover:
    """A shape of one colour, whose centre moves by the same step from frame to frame."""

    def __init__(self, clip: Clip, rng: np.random.Generator) -> None:
        side = min(clip.height, clip.width)
        self.inside = SHAPES[str(rng.choice(list(SHAPES)))]
        self.color = rng.uniform(0, 255, 3).astype(np.float32)
        self.radius = side * float(rng.uniform(0.08, 0.35))
        self.start = rng.uniform(0.1, 0.9, 2) * (clip.height, clip.width)
        self.step = rng.uniform(-1, 1, 2) * side / 12

    def paint(self, picture: Image32, rows: Image32, columns: Image32, frame: int) -> None:
        """Paint the shape of one frame onto a picture."""
        y, x = self.start + self.step * frame
        picture[self.inside(np.abs(rows - y), np.abs(columns - x), self.radius)] = self.color


def _background(height: int, width: int, rng: np.random.Generator) -> Image32:
    """Draw a picture of float levels from 0 to 255."""
    kind = rng.choice(["plain", "gradient", "stripes", "texture", "texture"])
    low, high = rng.uniform(0, 255, (2, 3)).astype(np.float32)
    if kind == "plain":
        return np.broadcast_to(low, (height, width, 3)).copy()
    if kind == "texture":
        return _texture(height, width, rng)
    rows, columns = np.indices((height, width), dtype=np.float32)
    angle = rng.uniform(0, 2 * np.pi)
    along = np.cos(angle) * rows / height + np.sin(angle) * columns / width
    if kind == "stripes":
        along = np.sin(along * 2 * np.pi * rng.uniform(1, 6))
    along = (along - along.min()) / (np.ptp(along) + 1e-6)
    return np.asarray(low + along[..., None] * (high - low), dtype=np.float32)


def _texture(height: int, width: int, rng: np.random.Generator) -> Image32:
    """Draw a random picture in which amplitude falls with frequency, as in photographs."""
    picture = np.zeros((height, width, 3), np.float32)
    cell, strength = max(height, width) / 2, 1.0
    saturation = rng.uniform(0.1, 0.7)
    while cell >= 2:
        grid = rng.standard_normal((int(np.ceil(height / cell)) + 1, int(np.ceil(width / cell)) + 1, 4))
        octave = (1 - saturation) * grid[..., :1] + saturation * grid[..., 1:]
        for channel in range(3):
            layer = Image.fromarray(octave[..., channel].astype(np.float32))
            picture[..., channel] += strength * np.asarray(layer.resize((width, height), Image.Resampling.BICUBIC))
        cell, strength = cell / 2, strength * rng.uniform(0.4, 0.65)
    return np.asarray(rng.uniform(60, 200) + rng.uniform(25, 60) * picture, dtype=np.float32)
