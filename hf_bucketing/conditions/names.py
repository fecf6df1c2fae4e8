"""What a sample is shown beside its pixels and text: the names of such conditions, and which files fit a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from ..errors import MediaError

ConditionName: TypeAlias = Literal["first_frame", "last_frame", "control", "mask", "face", "reference"]
"""An image (`first_frame`, `last_frame`), or an image or video (`control`, `mask`, `face`), in a column; or any number
of them (`reference`), in one or several columns of files or of lists of files."""

CONDITIONS: tuple[ConditionName, ...] = get_args(ConditionName)

MASK: ConditionName = "mask"
"""The condition that every model takes, because it weighs the loss: white is learned. A sample may lack it."""

REFERENCE: ConditionName = "reference"
"""The condition of which a sample has any number of files, whose sizes a `ReferenceRule` chooses.

All others are one file per sample.
"""

FACE: ConditionName = "face"
"""The condition that keeps the size of its file: the face of a person in the sample, cut out of its frames.

All others but references lie over their sample pixel by pixel.
"""

KEYFRAMES = "keyframes"
"""Frames of a sample that a run draws to show as further tokens: where a sample is encoded, the numbers `(n,)` of the
frames; and among its encoded conditions a tuple of their latents, `(C, 1, h, w)`."""

FRAME_BY_FRAME: tuple[ConditionName, ...] = ("control", "mask", FACE)
"""Conditions that have all frames of the sample; an image serves every frame."""

MOVING: tuple[ConditionName, ...] = (*FRAME_BY_FRAME, REFERENCE)
"""Conditions that may be videos, which are shown at the times of their sample."""

_LATEST = 0.5
"""How long the last frame of a video is certainly shown, in frames, see `media.decode`."""


def columns_of(condition: str, columns: str) -> tuple[str, ...]:
    """Return the columns of a condition: of references several, separated by commas, of all others one."""
    return tuple(columns.split(",")) if condition == REFERENCE else (columns,)


def all_columns(conditions: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns of all conditions, each once.

    Example:
        >>> all_columns({"mask": "mask", "reference": "person,coat"})
        ('mask', 'person', 'coat')
    """
    columns = (column for name, named in conditions.items() for column in columns_of(name, named))
    return tuple(dict.fromkeys(columns))


def is_missing(cell: Any) -> bool:
    """Return whether a cell holds no file: None, or what datasets makes of it in an image or video column."""
    return cell is None or (isinstance(cell, dict) and cell.get("path") is None and cell.get("bytes") is None)


def check_kind(name: str, path: str, *, still: bool, sample_is_image: bool) -> None:
    """Raise MediaError for a video where an image is needed."""
    if still or (name in MOVING and not sample_is_image):
        return
    needed = "an image too, as its sample is one" if name in MOVING else "an image"
    raise MediaError(f"The {name} {path} is a video, but it must be {needed}.")


def check_shape(name: str, path: str, *, size: tuple[int, int], sample: tuple[int, int]) -> None:
    """Raise MediaError if what lies over a sample has another aspect ratio, but for rounding sides by a pixel.

    Args:
        name (`str`): Name of the condition.
        path (`str`): Its file.
        size (`tuple[int, int]`): Height and width of the condition in pixels.
        sample (`tuple[int, int]`): Height and width of the sample's file.
    """
    (height, width), (sample_height, sample_width) = size, sample
    if abs(width * sample_height - height * sample_width) > sample_height + sample_width:
        raise MediaError(
            f"The {name} {path} has {width}×{height} pixels, but its sample {sample_width}×{sample_height}: it would "
            "be distorted, as it must lie over the sample. Write it with the sample's aspect ratio."
        )


def check_length(
    name: str, path: str, *, num_frames: int, fps: float, first: float, seconds: float, step: float, longer: bool
) -> None:
    """Raise MediaError if a video of a condition ends before its sample, or continues after it.

    Args:
        name (`str`): Name of the condition.
        path (`str`): Its file.
        num_frames (`int`): Frames of the condition's file.
        fps (`float`): Frames per second of the condition's file.
        first (`float`): Second of the file at which the sample begins.
        seconds (`float`): Seconds from the sample's first frame to its last.
        step (`float`): Seconds per frame of the sample.
        longer (`bool`): Whether it may be longer, as where the sample is a clip of a video that it shows whole.
    """
    length = f"The {name} {path} has {num_frames} frames at {fps:g} fps"
    if (num_frames - _LATEST) / fps <= first + seconds:
        raise MediaError(f"{length}, but the last frame of its sample is shown at {first + seconds:.3f} s.")
    if not longer and (num_frames - 1) / fps >= seconds + 2 * step:
        raise MediaError(
            f"{length}, but its sample ends at {seconds + step:.3f} s; a condition has its sample's length."
        )
