"""The width, height, number of frames and fps of each row: from file headers, or from columns that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Image

from ..errors import ColumnError, MediaError
from ..media.probe import FPS_TOLERANCE, MAX_PIXELS, FileHeader, MediaInfo, frames_at_fps, read_header
from ..media.source import MediaSource
from ..settings import check_literals
from .apply import map_columns, undecoded, with_columns
from .arrays import column_array, column_batches, column_table, is_text, numbers, whole_numbers
from .faults import NAMED_ROWS, OF_BATCH, Report, listed, path_of, paths_of, raise_error
from .layouts import STILL_IMAGES
from .settings import SIDES, TIMES, OnFileError, SizesFrom

_UNREADABLE = FileHeader(MediaInfo(-1, -1, -1, 0.0), False)
_SAMPLED_FILES = 16
_NAMED_FILES = 30
"""Files that cannot be read that a message names, the first few with what is wrong."""
SIZES = (*SIDES, *TIMES)
"""Columns of the size of each row."""

MAY_BE_TRANSPARENT = "may_be_transparent"
"""Column of whether the file of a row can hold transparent parts."""

_ROUNDED_FRAMES = 0.01
"""Frames by which a duration may be too short, since its decimals are rounded."""


@dataclass(frozen=True, slots=True)
class MediaMetadata:
    """Read `width`, `height`, `num_frames` and `fps` of an image or video column from file headers.

    A batch function for `Dataset.map(batched=True)`, also on an `IterableDataset`; no frame is decoded. The cells may
    be paths, bytes, or the dictionaries of `Image(decode=False)` and `Video(decode=False)`. Sizes are as shown:
    EXIF orientation, display rotation and sample aspect ratio are applied. `num_frames_estimated` marks videos whose
    number of frames was computed from the duration, because no header states it. Results are not taken from the cache
    of datasets, since a file may be replaced under its name.

    Args:
        column (`str`): Media column.
        target_fps (`float`, *optional*): Frame rate to train at. `num_frames` then counts the frames at that rate and
            `fps` is that rate, or the file's own if it is lower (frames are never invented).
        root (`str`, *optional*): Folder or URL that relative paths start from; they must not leave it.
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
    output_columns: ClassVar[tuple[str, ...]] = ("width", "height", "num_frames", "fps", "num_frames_estimated")
    vectorised = False
    reusable = False

    def __post_init__(self) -> None:
        _check_target_fps(self.target_fps)
        check_literals(self, error=ColumnError)
        if not 1 <= self.max_pixels <= MAX_PIXELS:
            raise ColumnError(f"`max_pixels` must be from 1 to {MAX_PIXELS}, got {self.max_pixels}.")

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must have."""
        return (self.column,)

    def __call__(self, batch: Mapping[str, Sequence[Any]], report: Report = raise_error) -> dict[str, list[Any]]:
        """Return the five columns for a batch of cells.

        Args:
            batch (mapping of sequences of length `n`): Columns.
            report ([`Report`]): As in [`add_sizes`].

        Raises:
            MediaError: Under `on_error="raise"`, for unreadable files; the message counts them and names the first.
        """
        results = [self._header(cell) for cell in batch[self.column]]
        faults = {row: str(header) for row, header in enumerate(results) if isinstance(header, MediaError)}
        if faults and self.on_error == "raise":
            report(_unreadable_files(faults, count=len(faults), total=len(results), sentence=OF_BATCH))
        headers = [_UNREADABLE if isinstance(header, MediaError) else header for header in results]
        columns = {name: [getattr(header.info, name) for header in headers] for name in MediaInfo._fields}
        num_frames, fps = frames_at_fps(columns["num_frames"], columns["fps"], self.target_fps)
        columns |= {"num_frames": num_frames.tolist(), "fps": fps.tolist()}
        columns[MAY_BE_TRANSPARENT] = [header.may_be_transparent for header in headers]
        return {name: columns[name] for name in self.output_columns}

    def read(self, cell: Any) -> MediaInfo | MediaError:
        """Return what the header of a cell's file says, at its own frame rate, or why it cannot be read."""
        header = self._header(cell)
        return header if isinstance(header, MediaError) else header.info

    def _header(self, cell: Any) -> FileHeader | MediaError:
        try:
            source = MediaSource.from_cell(cell, root=self.root, name="its file")
            return read_header(source, exact=self.exact, max_pixels=self.max_pixels)
        except MediaError as error:
            return error


@dataclass(frozen=True, slots=True)
class _WithTransparency(MediaMetadata):
    """Also mark the files that can hold transparent parts; unreadable ones are rejected."""

    output_columns = (*MediaMetadata.output_columns, MAY_BE_TRANSPARENT)

    @classmethod
    def of(cls, metadata: MediaMetadata, **changes: Any) -> _WithTransparency:
        settings = {field.name: getattr(metadata, field.name) for field in fields(metadata) if field.init}
        return cls(**{**settings, "on_error": "reject", **changes})


@dataclass(frozen=True, slots=True)
class ExistingMetadata:
    """Take `width`, `height`, `num_frames` and `fps` from columns that a data set already has, without opening a file.

    A vectorised batch function for `Dataset.map(batched=True)`, also on an `IterableDataset`; takes lists, numpy
    arrays or Arrow columns. Rows without a value, and videos without a frame rate above 0, get sizes of −1, which
    `BucketColumns` turns into the rejection `UNREADABLE`. A column that already has its name is left unchanged.
    A number of frames that follows from a duration is rounded down, so that every frame exists.

    Args:
        width (`str`): Column of widths in pixels, as shown.
        height (`str`): Column of heights in pixels, as shown.
        num_frames (`str`, *optional*): Column with the number of frames in the file; without it, all rows are images.
        fps (`str`, *optional*): Column with the frames per second of the file; needed with `num_frames` or `duration`.
        duration (`str`, *optional*): Column with the seconds of the file, in place of `num_frames`; 0 for images.
        target_fps (`float`, *optional*): As in `MediaMetadata`.
        on_error (`"raise"` or `"reject"`): Whether a row without a size stops [`sizes`][ExistingMetadata.sizes].
        media_column (`str`, *optional*): Media column, whose files messages of `sizes` name.

    Raises:
        ColumnError: If `fps` and one of `num_frames` and `duration` are not given together, `target_fps` is not above
            0 or given without them, or all columns already have their names.
    """

    width: str
    height: str
    num_frames: str | None = field(default=None, kw_only=True)
    fps: str | None = field(default=None, kw_only=True)
    duration: str | None = field(default=None, kw_only=True)
    target_fps: float | None = field(default=None, kw_only=True)
    on_error: OnFileError = field(default="reject", kw_only=True)
    media_column: str | None = field(default=None, kw_only=True)
    rule_version: int = field(default=1, init=False)

    optional_columns = ()
    vectorised = True

    def __post_init__(self) -> None:
        _check_target_fps(self.target_fps)
        if (self.num_frames is not None) + (self.duration is not None) != (self.fps is not None):
            raise ColumnError(
                "`num_frames` and `fps` go together: give the names of both columns, or neither for images. "
                "`duration` takes the place of `num_frames`."
            )
        if self.target_fps is not None and self.fps is None:
            raise ColumnError("`target_fps` has no effect on images; leave it out, or give `num_frames` and `fps`.")
        if not self.output_columns:
            raise ColumnError("All four columns already have their names; there is nothing to do.")

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must have."""
        return tuple(self._names.values())

    @property
    def _names(self) -> dict[str, str]:
        names = (*SIDES, *TIMES, "duration")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

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
        columns = _sizes(batch, self._names, target_fps=self.target_fps)
        return {name: columns[name] for name in self.output_columns}

    def sizes(self, batch: Mapping[str, Sequence[Any]], report: Report = raise_error) -> dict[str, list[Any]]:
        """Return all four columns for a batch of a stream, those included that already have their names.

        Args:
            batch (mapping of sequences of length `n`): Columns.
            report ([`Report`]): As in [`add_sizes`].

        Raises:
            ColumnError: As above, or, under `on_error="raise"`, if a row lacks a size.
        """
        columns = _sizes(batch, self._names, target_fps=self.target_fps)
        lacking = np.minimum.reduce([columns[name] for name in (*SIDES, "num_frames")]) < 1
        rows = np.flatnonzero(lacking).tolist()
        if rows and self.on_error == "raise":
            files = batch[self.media_column] if self.media_column is not None else [None] * len(lacking)
            texts = [
                f"row {row} ({path_of(files[row]) or 'a row without a path'}) has "
                + ", ".join(f"{name} {batch[name][row]}" for name in self.input_columns)
                for row in rows[:NAMED_ROWS]
            ]
            report(
                ColumnError(
                    f"{len(rows)} of {len(lacking)} rows lack a size: {listed(texts, total=len(rows))}.{OF_BATCH}",
                    advice=["correct the columns", 'reject such rows with `on_error="reject"`'],
                )
            )
        columns |= {name: np.where(lacking, -1, columns[name]) for name in (*SIDES, "num_frames")}
        return {name: values.tolist() for name, values in columns.items()}


def _sizes(
    batch: Mapping[str, Any] | pa.Table, names: Mapping[str, str], *, target_fps: float | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Return the four columns of a batch, from the columns of those names or of `duration`; −1 where a size lacks."""
    width, height = whole_numbers(batch, names["width"]), whole_numbers(batch, names["height"])
    num_frames, fps = np.ones_like(width), np.zeros(len(width))
    if "fps" in names:
        fps = numbers(batch, names["fps"]).astype(np.float64)
    if "num_frames" in names:
        num_frames = whole_numbers(batch, names["num_frames"])
    elif "duration" in names:
        seconds = numbers(batch, names["duration"]).astype(np.float64)
        frames = np.where(seconds == 0, 1.0, np.floor(seconds * fps + _ROUNDED_FRAMES))
        num_frames = np.where(frames >= 1, np.nan_to_num(frames, nan=-1.0), -1).astype(np.int64)
    bad = (np.minimum(np.minimum(width, height), num_frames) < 0) | ((num_frames > 1) & ~(fps > 0))
    num_frames, fps = frames_at_fps(num_frames, np.where(bad | (num_frames <= 1), 0.0, fps), target_fps)
    sizes = {"width": width, "height": height, "num_frames": num_frames}
    return {**{name: np.where(bad, -1, size) for name, size in sizes.items()}, "fps": fps}


def _check_target_fps(target_fps: float | None) -> None:
    if target_fps is not None and not target_fps > 0:
        raise ColumnError(f"`target_fps` must be above 0, got {target_fps}.")


class SizedDataset(NamedTuple):
    """Data set with the size of each row.

    Attributes:
        dataset (`Dataset`): Rows with `width`, `height`, `num_frames` and `fps`.
        origin (`str`): Sentence that says where the sizes come from.
        columns (mapping of `str` to `str`): Columns that held the sizes, by what they hold, such as
            `{"num_frames": "frame"}`; none if headers were read.
        transparency (`str`): Sentence on files that can hold transparent parts; `""` if none of those that were opened
            can.
    """

    dataset: Dataset
    origin: str
    columns: Mapping[str, str] = MappingProxyType({})
    transparency: str = ""


def add_sizes(
    dataset: Dataset,
    metadata: MediaMetadata,
    *,
    sizes_from: SizesFrom = "auto",
    size_columns: Mapping[str, str] | None = None,
    num_proc: int | None = None,
    report: Report = raise_error,
) -> SizedDataset:
    """Add `width`, `height`, `num_frames` and `fps`, from columns or from the headers of the files.

    By default, existing columns are used if every row has its size (and, unless all are still images, its frames and
    frame rate) and the headers of 16 sampled files agree. Otherwise all headers are read. Sizes of −1 mark files that
    an earlier run could not read; they are used where `metadata.on_error` is `"reject"`.

    Args:
        dataset (`Dataset`): Rows with a media column.
        metadata ([`MediaMetadata`]): How headers are read, and the target frame rate, also of existing columns.
        sizes_from (`"auto"`, `"columns"` or `"headers"`): Whether to choose as above, to open no file, or to read all
            headers. With `"columns"`, rows that lack a size are an error, or rejected as unreadable.
        size_columns (mapping of `str` to `str`, *optional*): Columns that have other names, such as
            `{"num_frames": "frame", "duration": "seconds"}`; see [`read_size_columns`].
        num_proc (`int`, *optional*): Number of processes that read headers.
        report (callable): Called with the error about files that cannot be read, unless `metadata.on_error` is
            `"reject"`, and about columns that differ from files; by default it raises it. If it returns, unreadable
            files have sizes of −1.

    Raises:
        ColumnError: If the data set's sizes differ from those of sampled files, or, with `"columns"`, if columns or
            sizes are missing; the message names them.
        MediaError: If files cannot be read, unless `metadata.on_error` is `"reject"`; the message counts them, and
            names the first ones with their rows.
    """
    if sizes_from not in get_args(SizesFrom):
        raise ColumnError(f'`sizes_from` must be "auto", "columns" or "headers", got {sizes_from!r}.')
    named = dict(size_columns or {})
    if sizes_from == "headers" and named:
        raise ColumnError('Omit `size_columns`: no effect with `sizes_from="headers"`.')
    names: dict[str, str] = {}
    reason = "as asked for"
    if sizes_from != "headers":
        names, reason = _usable_columns(dataset, metadata, named, all_rows=sizes_from == "auto")
        if not names and (sizes_from == "columns" or named):
            raise ColumnError(
                f"The sizes cannot be taken from columns: {reason}; the data set has {dataset.column_names}.",
                advice=["name columns as `size_columns`", 'read the files with `sizes_from="headers"`'],
            )
    checks, transparency = "no file was opened", ""
    if names and sizes_from == "auto":
        unreadable, checks, transparency = _compare_with_files(dataset, names, metadata, report)
        if unreadable:
            names, reason = {}, f"{unreadable} of the files that were checked cannot be read"
    if not names:
        sized = map_columns(dataset, _WithTransparency.of(metadata), num_proc=num_proc, overwrite=True)
        if metadata.on_error == "raise":
            _check_readable(sized, metadata, report)
        present = [name for name in (*SIDES, *TIMES) if name in dataset.column_names]
        count = int(column_array(sized, MAY_BE_TRANSPARENT).sum())
        transparency = _describe_transparency(count, len(sized))
        sized = sized.remove_columns([MAY_BE_TRANSPARENT])
        unused = f", instead of the columns {', '.join(present)}: {reason}" if present else ""
        origin = f"Sizes are read from the headers of the files{unused}."
        return SizedDataset(sized, origin, transparency=transparency)
    batch = column_table(dataset, names.values())
    columns = _sizes(batch, names, target_fps=metadata.target_fps)
    sized = with_columns(undecoded(dataset, [metadata.column]), columns)
    return SizedDataset(sized, f"Sizes are the columns {', '.join(names.values())}; {checks}.", names, transparency)


def _describe_transparency(count: int, total: int) -> str:
    """Return a sentence on files that can hold transparent parts, `""` for none."""
    laid = "which training and caching lay on white, or on their --background"
    return f"{count} of {total} files can hold transparent parts, {laid}." if count else ""


def _check_readable(sized: Dataset, metadata: MediaMetadata, report: Report) -> None:
    """Report a MediaError if files could not be read; the first ones are read again, for the reason."""
    rows = np.flatnonzero(column_array(sized, "width") < 0)
    if not len(rows):
        return
    faults = {}
    for row in rows[:NAMED_ROWS].tolist():
        cell = sized.select_columns([metadata.column]).select([row])[metadata.column][0]
        header = metadata.read(cell)
        can_be_now = f"{path_of(cell)} could not be read before, and can be now"
        faults[row] = str(header) if isinstance(header, MediaError) else can_be_now
    others = paths_of(sized, rows[NAMED_ROWS:_NAMED_FILES].tolist(), metadata.column)
    named = listed([name or "a row without a path" for name in others], total=len(rows) - NAMED_ROWS, separator=", ")
    sentence = f" The others are {named}." if named else ""
    report(_unreadable_files(faults, count=len(rows), total=len(sized), sentence=sentence))


def _unreadable_files(faults: Mapping[int, str], *, count: int, total: int, sentence: str = "") -> MediaError:
    """Return the error about files, by what is wrong with those of the first rows."""
    named = [f"row {row}: {fault.rstrip('.')}" for row, fault in [*faults.items()][:NAMED_ROWS]]
    return MediaError(
        f"{count} of {total} files cannot be read: {listed(named, total=count)}.{sentence}",
        advice=["correct the files or their paths", 'reject their rows with `on_error="reject"`'],
    )


def _usable_columns(
    dataset: Dataset, metadata: MediaMetadata, named: Mapping[str, str], *, all_rows: bool
) -> tuple[dict[str, str], str]:
    """Return the columns that hold the size of every row, by what they hold; or none, and the reason.

    Where unreadable files are rejected, sizes of −1 as `MediaMetadata` writes them are sizes too; no value is one only
    if not `all_rows` need a size.
    """
    times = ("duration", "fps") if "duration" in named else TIMES
    names = {name: named.get(name, name) for name in (*SIDES, *times)}
    present = set(dataset.column_names)
    if absent := sorted(set(named.values()) - present):
        return {}, f"there is no column {' or '.join(absent)}"
    if not len(dataset) or not {names["width"], names["height"]} <= present:
        return {}, "width and height are needed"
    if not set(names.values()) <= present:
        if not _all_still_images(dataset, metadata.column):
            return {}, "videos need num_frames and fps too"
        names = {name: names[name] for name in SIDES}
    batch = column_table(dataset, names.values())
    try:
        sizes = _sizes(batch, names)
    except ColumnError as error:
        return {}, str(error)
    incomplete = np.minimum.reduce([sizes[name] for name in (*SIDES, "num_frames")]) < 1
    if metadata.on_error == "reject":
        counts = [name for name in names if name not in ("fps", "duration")]
        incomplete &= all_rows & ~np.logical_and.reduce([numbers(batch, names[name]) == -1 for name in counts])
    if incomplete.any():
        return {}, f"{incomplete.sum()} rows lack a size or frame rate, the first of them row {incomplete.argmax()}"
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


def _compare_with_files(
    dataset: Dataset, names: Mapping[str, str], metadata: MediaMetadata, report: Report
) -> tuple[int, str, str]:
    """Read some headers, report those that differ from the columns, return how many cannot be read, and two texts.

    These are a summary, and a sentence on transparency. Frames are those of the file, before any `target_fps`. A frame
    rate may be rounded, and a number of frames that was computed from the duration may be off by a few.
    """
    rows = np.unique(np.linspace(0, len(dataset) - 1, _SAMPLED_FILES).astype(int)).tolist()
    sample = undecoded(dataset.select_columns([metadata.column, *names.values()]).select(rows), [metadata.column])
    cells = sample[metadata.column][:]
    from_files = _WithTransparency.of(metadata, target_fps=None)({metadata.column: cells})
    from_columns = _sizes(column_table(sample, names.values()), names)
    compared = [*SIDES, *(TIMES if "fps" in names else ())]
    unreadable = 0
    differing = []
    for position, row in enumerate(rows):
        file = {name: values[position] for name, values in from_files.items()}
        if file["width"] < 0:
            unreadable += bool(from_columns["width"][position] >= 0)
            continue
        file["num_frames_estimated"] |= "duration" in names
        wrong = [name for name in compared if not _agrees(name, from_columns[name][position], file)]
        if wrong:
            columns = ", ".join(f"{name} {from_columns[name][position]}" for name in compared)
            header = ", ".join(f"{name} {file[name]}" for name in compared)
            differing.append(f"row {row} ({path_of(cells[position])}) has {columns}, but the file has {header}")
    if differing:
        named = listed(differing[:NAMED_ROWS], total=len(differing))
        report(
            ColumnError(
                f"{len(differing)} of {len(rows)} files that were checked have other sizes than their columns: "
                f"{named}, as shown.",
                advice=["correct the columns", 'read the sizes of all files with `sizes_from="headers"`'],
            )
        )
    outcome = f"{len(differing)} of {len(rows)} files differ" if differing else f"{len(rows)} files agree"
    transparency = _describe_transparency(sum(from_files[MAY_BE_TRANSPARENT]), len(rows))
    return unreadable, f"the headers of {outcome}", transparency


def _agrees(name: str, stated: float, file: Mapping[str, Any]) -> bool:
    if name == "fps":
        return file["num_frames"] == 1 or abs(stated - file["fps"]) <= FPS_TOLERANCE * file["fps"]
    tolerance = max(1.0, 0.02 * file["num_frames"]) if name == "num_frames" and file["num_frames_estimated"] else 0.0
    return abs(stated - file[name]) <= tolerance
