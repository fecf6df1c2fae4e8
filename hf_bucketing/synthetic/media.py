"""Generated clips and images of moving shapes, with captions that say what is shown."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
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
