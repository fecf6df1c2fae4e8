"""The width, height, number of frames and fps of each row: from file headers, or from columns that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Image

from ..errors import ColumnError, MediaError
from ..media.probe import MAX_PIXELS, MediaInfo, frames_at_fps, probe
from ..media.source import MediaSource
from ..settings import check_literals
from .apply import map_columns, undecoded
from .arrays import column_batches, is_text, numbers, whole_numbers
from .layouts import STILL_IMAGES

_UNREADABLE = MediaInfo(-1, -1, -1, 0.0)
_SAMPLED_FILES = 16
_SIZES = ("width", "height")
_TIMES = ("num_frames", "fps")


@dataclass(frozen=True, slots=True)
class MediaMetadata:
    """Read `width`, `height`, `num_frames` and `fps` of an image or video column from file headers.

    A batch function for `Dataset.map(batched=True)`, also on an `IterableDataset`; no frame is decoded. The cells may
    be paths, bytes, or the dictionaries of `Image(decode=False)` and `Video(decode=False)`. Sizes are as shown:
    EXIF orientation, display rotation and sample aspect ratio are applied. `num_frames_estimated` marks videos whose
    number of frames was computed from the duration, because no header states it.

    Args:
        column (`str`): Media column.
        target_fps (`float`, *optional*): Frame rate to train at. `num_frames` then counts the frames at that rate and
            `fps` is that rate, or the file's own if it is lower (frames are never invented).
        root (`str`, *optional*): Folder that relative paths start from; they must not leave it.
        on_error (`"raise"` or `"reject"`): Whether an unreadable file stops the map, or gets sizes of −1, which
            `BucketColumns` turns into the rejection `UNREADABLE`.
        exact (`bool`): Whether to count the packets of each video; this reads the whole file.
        max_pixels (`int`): Largest frame in pixels, at most 2**28, which is what FFmpeg decodes. Larger ones count as
            unreadable, before anything is allocated for them. Pillow also limits images to 2 × `MAX_IMAGE_PIXELS`.

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
        check_literals(self, error=ColumnError)
        if not 1 <= self.max_pixels <= MAX_PIXELS:
            raise ColumnError(f"`max_pixels` must be from 1 to {MAX_PIXELS}, got {self.max_pixels}.")

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must have."""
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
    """Take `width`, `height`, `num_frames` and `fps` from columns that a data set already has, without opening a file.

    A vectorised batch function for `Dataset.map(batched=True)`, also on an `IterableDataset`; takes lists, numpy
    arrays or Arrow columns. Rows without a value, and videos without a frame rate above 0, get sizes of −1, which
    `BucketColumns` turns into the rejection `UNREADABLE`. A column that already has its name is left unchanged.

    Args:
        width (`str`): Column of widths in pixels, as shown.
        height (`str`): Column of heights in pixels, as shown.
        num_frames (`str`, *optional*): Column with the number of frames in the file; without it, all rows are images.
        fps (`str`, *optional*): Column with the frames per second of the file; needed with `num_frames`.
        target_fps (`float`, *optional*): As in `MediaMetadata`.

    Raises:
        ColumnError: If only one of `num_frames` and `fps` is given, `target_fps` is not above 0 or given without
            them, or all columns already have their names.
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
            raise ColumnError(
                "`num_frames` and `fps` go together: give the names of both columns, or neither for images."
            )
        if self.target_fps is not None and self.fps is None:
            raise ColumnError("`target_fps` has no effect on images; leave it out, or give `num_frames` and `fps`.")
        if not self.output_columns:
            raise ColumnError("All four columns already have their names; there is nothing to do.")

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must have."""
        return tuple(name for name in (self.width, self.height, self.num_frames, self.fps) if name is not None)

    @property
    def output_columns(self) -> tuple[str, ...]:
        """The four columns without those that already have their names."""
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


class SizedDataset(NamedTuple):
    """Data set with the size of each row.

    Attributes:
        dataset (`Dataset`): Rows with `width`, `height`, `num_frames` and `fps`.
        origin (`str`): Sentence that says where the sizes come from.
    """

    dataset: Dataset
    origin: str


def add_sizes(
    dataset: Dataset, metadata: MediaMetadata, *, read_headers: bool = False, num_proc: int | None = None
) -> SizedDataset:
    """Add `width`, `height`, `num_frames` and `fps`, from columns of these names if they are right, else from headers.

    Existing columns are used if every row has its size (and, unless all are still images, its frames and frame rate)
    and the headers of 16 sampled files agree. Otherwise all headers are read. Sizes of −1 mark files that an earlier
    run could not read; they are used where `metadata.on_error` is `"reject"`.

    Args:
        dataset (`Dataset`): Rows with a media column.
        metadata ([`MediaMetadata`]): How headers are read, and the target frame rate, also of existing columns.
        read_headers (`bool`): Whether to read all headers even if the data set has sizes.
        num_proc (`int`, *optional*): Number of processes that read headers.

    Raises:
        ColumnError: If the data set's sizes differ from those of a sampled file; the message names it.
        MediaError: If a file cannot be read, unless `metadata.on_error` is `"reject"`.
    """
    names, reason = ((), "as asked for") if read_headers else _usable_columns(dataset, metadata)
    if names:
        unreadable = _compare_with_files(dataset, names, metadata)
        if unreadable:
            names, reason = (), f"{unreadable} of the files that were checked cannot be read"
    if not names:
        sized = map_columns(dataset, metadata, num_proc=num_proc, overwrite=True)
        present = [name for name in (*_SIZES, *_TIMES) if name in dataset.column_names]
        unused = f", instead of the columns {', '.join(present)}: {reason}" if present else ""
        return SizedDataset(sized, f"Sizes are read from the headers of the files{unused}.")
    sized = undecoded(dataset, [metadata.column])
    target = metadata.target_fps if len(names) == 4 else None
    if len(names) < 4 or target is not None:
        times = dict(zip(_TIMES, names[2:], strict=False))
        sized = map_columns(sized, ExistingMetadata(*_SIZES, **times, target_fps=target), overwrite=True)
    checked = min(len(dataset), _SAMPLED_FILES)
    return SizedDataset(sized, f"Sizes are the columns {', '.join(names)}; the headers of {checked} files agree.")


def _usable_columns(dataset: Dataset, metadata: MediaMetadata) -> tuple[tuple[str, ...], str]:
    """Return the columns that hold the size of every row; or none, and the reason.

    Where unreadable files are rejected, sizes of −1 as `MediaMetadata` writes them are sizes too; no value is not.
    """
    if not len(dataset) or not set(_SIZES) <= set(dataset.column_names):
        return (), "width and height are needed"
    names = (*_SIZES, *_TIMES) if set(_TIMES) <= set(dataset.column_names) else _SIZES
    if len(names) == 2 and not _all_still_images(dataset, metadata.column):
        return (), "videos need num_frames and fps too"
    batch: dict[str, Any] = dataset.select_columns(list(names)).with_format("arrow")[:]
    try:
        sizes = [whole_numbers(batch, name) for name in names[:3]]
        fps = numbers(batch, "fps") if len(names) == 4 else None
    except ColumnError as error:
        return (), str(error)
    incomplete = np.minimum.reduce(sizes) < 1
    if fps is not None:
        incomplete |= (sizes[2] > 1) & ~(fps > 0)
    if metadata.on_error == "reject":
        incomplete &= ~np.logical_and.reduce([numbers(batch, name) == -1 for name in names[:3]])
    if incomplete.any():
        return (), f"{incomplete.sum()} rows lack a size or frame rate, the first of them row {incomplete.argmax()}"
    return names, ""


def _all_still_images(dataset: Dataset, column: str) -> bool:
    """Return whether the files are images by their column's type or their names' endings."""
    feature = dataset.features[column]
    if not is_text(feature):
        return isinstance(feature, Image)
    endings = "|".join(ending[1:] for ending in sorted(STILL_IMAGES))
    return all(
        pc.all(pc.match_substring_regex(cells, rf"\.({endings})$", ignore_case=True).fill_null(False)).as_py()
        for cells in column_batches(dataset, column)
    )


def _compare_with_files(dataset: Dataset, names: tuple[str, ...], metadata: MediaMetadata) -> int:
    """Read some headers; return how many cannot be read, or raise if one differs from the columns.

    Frames are those of the file, before any `target_fps`. A frame rate may be rounded, and a number of frames that was
    computed from the duration may be off by a few.
    """
    rows = np.unique(np.linspace(0, len(dataset) - 1, _SAMPLED_FILES).astype(int)).tolist()
    sample = undecoded(dataset.select_columns([metadata.column, *names]).select(rows), [metadata.column])
    cells = sample[metadata.column][:]
    found = replace(metadata, target_fps=None)({metadata.column: cells})
    given = {name: sample[name][:] for name in names}
    unreadable = 0
    for position, row in enumerate(rows):
        file = {name: values[position] for name, values in found.items()}
        if file["width"] < 0:
            unreadable += given["width"][position] >= 0
            continue
        wrong = [name for name in names if not _agrees(name, given[name][position], file)]
        if wrong:
            path = cells[position].get("path") if isinstance(cells[position], dict) else cells[position]
            columns = ", ".join(f"{name} {given[name][position]}" for name in names)
            header = ", ".join(f"{name} {file[name]}" for name in names)
            raise ColumnError(
                f"Row {row} ({path}) has {columns}, but the file has {header}, as shown; correct the columns, or use "
                "`read_headers=True`, which reads the sizes of all files instead."
            )
    return unreadable


def _agrees(name: str, given: float, file: Mapping[str, Any]) -> bool:
    if name == "fps":
        return file["num_frames"] == 1 or abs(given - file["fps"]) <= 0.01 * file["fps"]
    tolerance = max(1.0, 0.02 * file["num_frames"]) if name == "num_frames" and file["num_frames_estimated"] else 0.0
    return abs(given - file[name]) <= tolerance
