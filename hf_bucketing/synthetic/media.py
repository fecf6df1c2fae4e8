"""Generated clips and images of moving shapes, with captions, and what a rendered clip shows of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from ..errors import BucketingError
from ..files import complete_folder
from ..media.write import write_video

Distance = npt.NDArray[np.float32]
Inside = npt.NDArray[np.bool_]

COLORS = {
    "red": (220, 50, 47),
    "green": (60, 160, 60),
    "blue": (50, 90, 210),
    "yellow": (230, 200, 60),
    "white": (235, 235, 235),
}
SHAPES: dict[str, Callable[[Distance, Distance, float], Inside]] = {
    "circle": lambda dy, dx, radius: dy**2 + dx**2 < radius**2,
    "square": lambda dy, dx, radius: np.maximum(dy, dx) < radius,
    "diamond": lambda dy, dx, radius: dy + dx < radius * 1.3,
}
"""Pixels inside a shape, by their distances from its centre."""

DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


class Clip(NamedTuple):
    """Size of a generated sample: frames, height and width in pixels, fps (0 for an image)."""

    frames: int
    height: int
    width: int
    fps: int = 0


DEMO_CLIPS = (
    Clip(33, 72, 128, 16),
    Clip(33, 128, 72, 16),
    Clip(17, 96, 96, 16),
    Clip(17, 64, 112, 8),
    Clip(25, 112, 64, 8),
    Clip(9, 96, 144, 8),
    Clip(1, 192, 128),
    Clip(1, 160, 160),
    Clip(1, 112, 224),
)
"""Nine sizes in landscape, portrait and square; images and clips of one, two and three seconds at two frame rates."""


def render(
    clip: Clip, *, shape: str, color: str, direction: str, brightness: float = 10.0
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield frames of a coloured shape that crosses a background, `(height, width, 3)`, by default a dark one.

    The shape goes six tenths of the frame in its direction, whatever the number of frames; an image shows the middle
    of the way. The levels of the background grow from `brightness` by 90: of red from left to right, of green by 70
    from the first frame to the last, of blue from top to bottom. They tell place and time to a small model, whose
    rotary embeddings tell it only distances.
    """
    rows, columns = np.indices((clip.height, clip.width), dtype=np.float32)
    radius = min(clip.height, clip.width) / 4
    step_y, step_x = DIRECTIONS[direction]
    for frame in range(clip.frames):
        way = frame / (clip.frames - 1) if clip.frames > 1 else 0.5
        travelled = 0.6 * (way - 0.5)
        y = clip.height * (0.5 + step_y * travelled)
        x = clip.width * (0.5 + step_x * travelled)
        inside = SHAPES[shape](np.abs(rows - y), np.abs(columns - x), radius)
        levels = np.stack([90 * columns / clip.width, 70 * way + 0 * rows, 90 * rows / clip.height], axis=-1)
        background = np.asarray(levels, np.float32) + brightness
        yield np.where(inside[..., None], np.array(COLORS[color], np.float32), background).astype(np.uint8)


def make_media_dataset(
    folder: str | os.PathLike[str], *, num_samples: int, clips: Sequence[Clip] = DEMO_CLIPS, seed: int = 0
) -> None:
    """Write H.264 mp4 files, png and jpg images, and captions.

    `folder/metadata.jsonl` lists all samples with `file_name` and `caption`; `folder/videos/` holds the videos with a
    `metadata.jsonl` of its own, so that it also loads as a `videofolder`. The folder appears under its name only
    when it is complete, and replaces an earlier one.

    Args:
        folder (path): Folder to write.
        num_samples (`int`): Number of samples, at least 1, whose sizes are taken in turn.
        clips (sequence of [`Clip`]): Sizes, with even sides for videos.
        seed (`int`): Seed of the contents.

    Raises:
        BucketingError: If there is nothing to write, or the folder exists and is no such data set.
    """
    if num_samples < 1 or not clips:
        raise BucketingError(f"A data set needs a sample and a size, got num_samples={num_samples}, clips={clips}.")
    with complete_folder(folder, marker="metadata.jsonl") as partial:
        _write_samples(partial, num_samples=num_samples, clips=clips, seed=seed)


def _write_samples(folder: Path, *, num_samples: int, clips: Sequence[Clip], seed: int) -> None:
    for name in ("videos", "images"):
        (folder / name).mkdir()
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num_samples):
        clip = clips[number % len(clips)]
        shape, color, direction = (str(rng.choice(list(names))) for names in (SHAPES, COLORS, DIRECTIONS))
        frames = render(clip, shape=shape, color=color, direction=direction)
        if clip.frames > 1:
            name = f"videos/{number:04d}.mp4"
            write_video(folder / name, frames, fps=clip.fps)
            caption = f"a {color} {shape} moving {direction} on a dark background"
        else:
            name = f"images/{number:04d}.{'png' if number % 2 else 'jpg'}"
            Image.fromarray(next(frames)).save(folder / name)
            caption = f"a picture of a {color} {shape} on a dark background"
        rows.append({"file_name": name, "caption": caption})
    _write_metadata(folder, rows)
    videos = [row for row in rows if row["file_name"].startswith("videos/")]
    if videos:
        _write_metadata(folder / "videos", [{**row, "file_name": Path(row["file_name"]).name} for row in videos])


def _write_metadata(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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
    backgrounds = np.stack([_ground_of(picture) for picture in levels])
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


def _ground_of(picture: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
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
