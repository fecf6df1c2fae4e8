"""The width, height, number of frames and fps of media, as columns: from the files, or from columns of other names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import ColumnError, MediaError
from ..media.probe import MediaInfo, frames_at_fps, probe
from ..media.source import MediaSource
from ..media.video import MAX_PIXELS
from .arrays import numbers, whole_numbers

_UNREADABLE = MediaInfo(-1, -1, -1, 0.0)


@dataclass(frozen=True, slots=True)
class MediaMetadata:
    """Read `width`, `height`, `num_frames` and `fps` of an image or video column from file headers.

    A batch function for `Dataset.map(batched=True)`, also on an `IterableDataset`; no frame is decoded. The cells may
    be paths, bytes, or the dictionaries of `Image(decode=False)` and `Video(decode=False)`. Sizes are as shown:
    EXIF orientation, display rotation and sample aspect ratio are applied. `num_frames_estimated` marks videos whose
    header does not count frames, so that the number follows from their duration.

    Args:
        column (`str`): Name of the media column.
        target_fps (`float`, *optional*): Frame rate that samples are trained at. `num_frames` then counts the frames
            at that rate and `fps` is that rate, or the file's own where it is lower (frames are never made up).
        root (`str`, *optional*): Folder that relative paths start from; they must not leave it.
        on_error (`"raise"` or `"reject"`): Whether an unreadable file stops the map, or gets sizes of −1, which
            `BucketColumns` turns into the rejection `UNREADABLE`.
        exact (`bool`): Whether to count the packets of each video, which reads the whole file.
        max_pixels (`int`): Frames that claim more count as unreadable, before anything is allocated for them; at most
            2**28, which is as much as FFmpeg decodes. For images, Pillow's limit of 2 × `MAX_IMAGE_PIXELS` holds too.

    Raises:
        ColumnError: If `target_fps` is not above 0, `on_error` is unknown, or `max_pixels` is out of range.
    """

    column: str
    target_fps: float | None = field(default=None, kw_only=True)
    root: str | None = field(default=None, kw_only=True)
    on_error: Literal["raise", "reject"] = field(default="raise", kw_only=True)
    exact: bool = field(default=False, kw_only=True)
    max_pixels: int = field(default=MAX_PIXELS, kw_only=True)
    rule_version: int = field(default=2, init=False)

    optional_columns = ()
    output_columns = ("width", "height", "num_frames", "fps", "num_frames_estimated")
    vectorised = False

    def __post_init__(self) -> None:
        _check_target_fps(self.target_fps)
        if self.on_error not in ("raise", "reject"):
            raise ColumnError(f'`on_error` must be "raise" or "reject", got {self.on_error!r}.')
        if not 1 <= self.max_pixels <= MAX_PIXELS:
            raise ColumnError(f"`max_pixels` must be from 1 to {MAX_PIXELS}, got {self.max_pixels}.")

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must hold."""
        return (self.column,)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return the five columns for a batch of cells.

        Raises:
            MediaError: Under `on_error="raise"`, for the first unreadable file; the message names it.
        """
        infos = [self._read(cell, row) for row, cell in enumerate(batch[self.column])]
        columns = {name: [getattr(info, name) for info in infos] for name in self.output_columns}
        num_frames, fps = frames_at_fps(columns["num_frames"], columns["fps"], self.target_fps)
        return {**columns, "num_frames": num_frames.tolist(), "fps": fps.tolist()}

    def _read(self, cell: Any, row: int) -> MediaInfo:
        try:
            source = MediaSource.from_cell(cell, root=self.root, name=f"row {row} of its batch")
            return probe(source, exact=self.exact, max_pixels=self.max_pixels)
        except MediaError:
            if self.on_error == "raise":
                raise
            return _UNREADABLE


@dataclass(frozen=True, slots=True)
class ExistingMetadata:
    """Take `width`, `height`, `num_frames` and `fps` from columns that a data set already has; no file is opened.

    A vectorised batch function for `Dataset.map(batched=True)`, also on an `IterableDataset`; takes lists, numpy
    arrays or Arrow columns. Rows without a value, or of several frames at no frame rate above 0, get sizes of −1,
    which `BucketColumns` turns into the rejection `UNREADABLE`. A column that has its name already stays as it is.

    Args:
        width (`str`): Column of widths in pixels, as shown.
        height (`str`): Column of heights in pixels, as shown.
        num_frames (`str`, *optional*): Column of frames in the file; without it, all rows are images.
        fps (`str`, *optional*): Column of frames per second of the file; goes with `num_frames`.
        target_fps (`float`, *optional*): As in `MediaMetadata`.

    Raises:
        ColumnError: If only one of `num_frames` and `fps` is given, `target_fps` is not above 0 or given without
            them, or all columns have their names already.
    """

    width: str
    height: str
    num_frames: str | None = field(default=None, kw_only=True)
    fps: str | None = field(default=None, kw_only=True)
    target_fps: float | None = field(default=None, kw_only=True)
    rule_version: int = field(default=1, init=False)

    optional_columns = ()
    vectorised = True

    def __post_init__(self) -> None:
        _check_target_fps(self.target_fps)
        if (self.num_frames is None) != (self.fps is None):
            raise ColumnError("num_frames and fps go together: give the names of both columns, or none for images.")
        if self.target_fps is not None and self.fps is None:
            raise ColumnError("target_fps has no effect on images; leave it out, or name num_frames and fps columns.")
        if not self.output_columns:
            raise ColumnError("All four columns have their names already; there is nothing to do.")

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must hold."""
        return tuple(name for name in (self.width, self.height, self.num_frames, self.fps) if name is not None)

    @property
    def output_columns(self) -> tuple[str, ...]:
        """The four columns, but for those that are there already."""
        resampled = ("num_frames", "fps") if self.target_fps is not None else ()
        names = ("width", "height", "num_frames", "fps")
        return tuple(name for name in names if name in resampled or getattr(self, name) != name)

    def __call__(self, batch: Mapping[str, Any] | pa.Table) -> dict[str, npt.NDArray[Any]]:
        """Return the columns for a batch.

        Raises:
            ColumnError: If a column does not hold numbers, or width, height or frames are not whole.
        """
        width, height = whole_numbers(batch, self.width), whole_numbers(batch, self.height)
        num_frames, fps = np.ones_like(width), np.zeros(len(width))
        if self.num_frames is not None and self.fps is not None:
            num_frames, fps = whole_numbers(batch, self.num_frames), numbers(batch, self.fps).astype(np.float64)
        bad = (np.minimum(np.minimum(width, height), num_frames) < 0) | ((num_frames > 1) & ~(fps > 0))
        num_frames, fps = frames_at_fps(num_frames, np.where(bad | (num_frames <= 1), 0.0, fps), self.target_fps)
        sizes = {"width": width, "height": height, "num_frames": num_frames}
        columns = {**{name: np.where(bad, -1, size) for name, size in sizes.items()}, "fps": fps}
        return {name: columns[name] for name in self.output_columns}


def _check_target_fps(target_fps: float | None) -> None:
    if target_fps is not None and not target_fps > 0:
        raise ColumnError(f"`target_fps` must be above 0, got {target_fps}.")
