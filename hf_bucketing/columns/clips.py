"""Several clips of one video: each becomes a row, with the second at which it begins and its number of frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from datasets.fingerprint import Hasher
from datasets.table import InMemoryTable

from ..buckets.arrays import BoolArray, FloatArray, IntArray, stored_column
from ..buckets.assignment import CLIP_SIZE
from ..errors import ColumnError
from ..media.rows import CLIP_END, CLIP_START
from ..randomness import ROW
from ..settings import check_literals
from .apply import with_columns
from .arrays import SIZE_COLUMNS, column_array, is_list_type
from .faults import NAMED_ROWS, OF_BATCH, Report, listed, path_of, paths_of, raise_error
from .settings import ClipRule, OnFileError

SCENE_START, SCENE_END = "start", "end"
"""Columns of the seconds at which scenes begin and end: numbers, or lists of numbers."""

_ADVICE = ["correct the columns start and end", 'leave the clips out with `on_error="reject"`']
_ROUNDING = 1e-6
"""Frames by which a time may miss a frame, since seconds are rounded."""

_LARGE_CELL = 4096
"""Mean bytes of a cell from which a column is not copied when its rows are repeated."""


class Clips(NamedTuple):
    """The clips of some rows, those of the first row first; all arrays of shape `(m,)`.

    Attributes:
        source: Row of each clip; every row has at least one.
        start: Second of the file at which it begins.
        end: Second at which it ends.
        num_frames: Its frames; as given for a row without a usable size.
        wrong: Whether its times are impossible.
    """

    source: IntArray
    start: FloatArray
    end: FloatArray
    num_frames: IntArray
    wrong: BoolArray


def spaced_clips(rule: ClipRule, num_frames: npt.ArrayLike, fps: npt.ArrayLike) -> Clips:
    """Return the clips of each video by a rule whose mode is not `"scenes"`.

    Args:
        rule ([`ClipRule`]): Mode and length.
        num_frames (array of `int`, shape `(n,)`): Frames of each file; below 1 for rows that are rejected.
        fps (array of `float`, shape `(n,)`): Frames per second; 0 for images.

    Example:
        >>> clips = spaced_clips(ClipRule(mode="all", frames=4), [10, 1], [2.0, 0.0])
        >>> clips.source.tolist(), clips.start.tolist(), clips.num_frames.tolist()
        ([0, 0, 0, 1], [0.0, 2.0, 4.0, 0.0], [4, 4, 2, 1])
    """
    frames, rate = np.asarray(num_frames, np.int64), np.asarray(fps, np.float64)
    assert rule.frames is not None, "ClipRule checks it"
    spare = np.maximum(frames - rule.frames, 0)
    if rule.mode == "all":
        left = frames % rule.frames
        counts = np.where(spare > 0, frames // rule.frames + (left > 1), 1)
    else:
        many = {"head": 1, "uniform": np.minimum(rule.number, spare + 1), "slide": spare // rule.number + 1}
        counts = np.broadcast_to(many[rule.mode], frames.shape)
    source, position = _repeated(counts)
    if rule.mode == "uniform":
        first = position * spare[source] // np.maximum(counts[source] - 1, 1)
    else:
        first = position * (rule.frames if rule.mode == "all" else rule.number)
    length = np.minimum(frames[source], rule.frames)
    if rule.mode == "all":
        is_last = position == counts[source] - 1
        length = np.where(is_last & (spare[source] > 0), frames[source] - first, length)
    rate = rate[source]
    divisor = np.where(rate > 0, rate, 1.0)
    start = np.where(rate > 0, first / divisor, 0.0)
    end = np.where(rate > 0, start + np.maximum(length, 0) / divisor, 0.0)
    return Clips(source, start, end, length, np.zeros(len(source), bool))


def scene_clips(start: Sequence[Any], end: Sequence[Any], num_frames: npt.ArrayLike, fps: npt.ArrayLike) -> Clips:
    """Return the clips that scene lists describe; a row without a scene is one clip, the whole file.

    A scene ends before its end: its frames are those at `start + i / fps` below `end`. An end may lie one frame beyond
    the end of the file, because data sets round it; the clip then has the frames that the file has.

    Args:
        start (sequence of numbers, lists or None, length `n`): Seconds at which scenes begin.
        end (sequence of numbers, lists or None, length `n`): Seconds at which they end.
        num_frames (array of `int`, shape `(n,)`): Frames of each file; below 1 for rows that are rejected.
        fps (array of `float`, shape `(n,)`): Frames per second; 0 for images, which have no scenes.

    Returns:
        [`Clips`]: `wrong` are those whose times are negative, not finite, no numbers, as many starts as ends, or do
        not lie in the file.
    """
    begins, counts = _flat(start)
    ends, end_counts = _flat(end)
    frames, rate = np.asarray(num_frames, np.int64), np.asarray(fps, np.float64)
    uneven = counts != end_counts
    if uneven.any():  # such rows get one clip that is wrong
        keep, keep_ends = np.repeat(~uneven, counts), np.repeat(~uneven, end_counts)
        begins, ends = _filled(begins[keep], counts, uneven), _filled(ends[keep_ends], end_counts, uneven)
        counts = np.where(uneven, 1, counts)
    uncut = counts == 0
    begins, ends = _filled(begins, counts, uncut, value=0.0), _filled(ends, counts, uncut, value=0.0)
    source, _ = _repeated(np.maximum(counts, 1))
    file_frames, rate = frames[source], rate[source]
    is_uncut, usable = uncut[source], file_frames >= 1
    with np.errstate(invalid="ignore"):
        wrong = ~((begins >= 0) & (ends > begins) & (ends * rate <= file_frames + 1 + _ROUNDING) & np.isfinite(ends))
        wrong |= ~(begins * rate <= file_frames - 1 + _ROUNDING) | (rate <= 0)
    wrong &= usable & ~is_uncut
    cut = usable & ~is_uncut & ~wrong
    begins, ends = np.where(cut, begins, 0.0), np.where(cut, ends, 0.0)
    in_scene = np.ceil((ends - begins) * rate - _ROUNDING).astype(np.int64)
    in_file = np.floor(file_frames - 1 - begins * rate + _ROUNDING).astype(np.int64) + 1
    length = np.where(cut, np.maximum(np.minimum(in_scene, in_file), 1), file_frames)
    file_end = np.where(usable & (rate > 0), file_frames / np.where(rate > 0, rate, 1.0), 0.0)
    return Clips(source, begins, np.where(cut, ends, file_end), length, wrong)


class ClippedDataset(NamedTuple):
    """Rows that are clips, and a sentence on how many there are.

    Attributes:
        dataset (`Dataset`): Rows with `CLIP_START`, `CLIP_END`, and `num_frames` of the clip.
        summary (`str`): Sentence on the files and the clips, and on those that are rejected.
    """

    dataset: Dataset
    summary: str


def cut_clips(
    dataset: Dataset,
    rule: ClipRule,
    *,
    on_error: OnFileError = "raise",
    media_column: str,
    caption_column: str | None = None,
    report: Report = raise_error,
) -> ClippedDataset:
    """Make a row of each clip.

    Bytes of files are not copied in memory, however many clips a file has. Where a row lists several scenes, a list of
    captions has one for each of them; a single caption belongs to all.

    Args:
        dataset (`Dataset`): Rows with the columns of `MediaMetadata`.
        rule ([`ClipRule`]): Places and length of the clips.
        on_error (`"raise"` or `"reject"`): Whether impossible times are an error, or their rows get the sizes of the
            rejection `CLIP`.
        media_column (`str`): Media column, whose files messages name.
        caption_column (`str`, *optional*): Caption column.
        report (callable): Called with the error about clips that do not lie in their files, under
            `on_error="raise"`, and about numbers of captions; by default it raises it.

    Raises:
        ColumnError: If there are no columns of scenes, they hold no numbers, a row has other numbers of captions and
            scenes, or, with `on_error="raise"`, if a clip does not lie in its file; the message names rows and files.
    """
    function = ClipRows(rule, on_error=on_error, caption_column=caption_column, media_column=media_column)
    batch: dict[str, Any] = {name: column_array(dataset, name) for name in (*SIZE_COLUMNS, "fps")}
    if rule.mode == "scenes":
        batch |= {name: _scene_column(dataset, name) for name in (SCENE_START, SCENE_END)}
        if caption_column is not None:
            batch[caption_column] = stored_column(dataset, caption_column)
    clips, columns, problem = function.cut(batch, report, path=lambda row: paths_of(dataset, [row], media_column)[0])
    if problem and on_error == "raise":
        report(ColumnError(problem, advice=_ADVICE))
        problem = ""
    rows = repeat_rows(dataset, clips.source)
    if ROW in rows.column_names and len(rows) != len(dataset):
        rows = rows.remove_columns([ROW])  # it names files; `PreparedDataset.save` numbers clips
    summary = f"{len(dataset)} rows make {len(rows)} clips. {problem}".strip()
    return ClippedDataset(with_columns(rows, columns), summary)


@dataclass(frozen=True, slots=True)
class ClipRows:
    """Make a row of each clip: a batch function, which [`cut_clips`] runs on all rows at once.

    For `IterableDataset.map(batched=True)` after `MediaMetadata`; a batch may become longer.

    Args:
        rule ([`ClipRule`]): Places and length of the clips.
        on_error (`"raise"` or `"reject"`): As in [`cut_clips`].
        caption_column (`str`, *optional*): As in [`cut_clips`].
        media_column (`str`, *optional*): Media column, whose files messages name.

    Raises:
        ColumnError: If `on_error` is unknown.
    """

    rule: ClipRule
    on_error: OnFileError = field(default="raise", kw_only=True)
    caption_column: str | None = field(default=None, kw_only=True)
    media_column: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_literals(self, error=ColumnError)

    def __call__(self, batch: Mapping[str, Sequence[Any]], report: Report = raise_error) -> dict[str, list[Any]]:
        """Return all columns of the clips of a batch of rows.

        Args:
            batch (mapping of sequences of length `n`): Columns.
            report ([`Report`]): As in [`cut_clips`].

        Raises:
            ColumnError: As [`cut_clips`]; rows are counted from the first of their batch.
        """
        files = [None] * len(batch["fps"]) if self.media_column is None else [*map(path_of, batch[self.media_column])]
        clips, columns, problem = self.cut(batch, report, path=files.__getitem__)
        if problem and self.on_error == "raise":
            report(ColumnError(problem + OF_BATCH, advice=_ADVICE))
        rows = clips.source.tolist()
        repeated = {name: [cells[row] for row in rows] for name, cells in batch.items()}
        return repeated | {name: values.tolist() for name, values in columns.items()}

    def cut(
        self, batch: Mapping[str, Any], report: Report, *, path: Callable[[int], str | None]
    ) -> tuple[Clips, dict[str, Any], str]:
        """Return the clips of a batch of rows, the columns in which they differ from their rows, and what is wrong.

        Args:
            batch (mapping): Sizes and `fps`, of length `n`, as arrays or lists; for scenes also their columns and the
                captions, as lists or Arrow columns.
            report ([`Report`]): Called with the error about numbers of captions.
            path (callable): Returns the path of a row's file, for messages.

        Returns:
            `tuple`: The clips; their columns, of shape `(m,)`; and a sentence on clips that do not lie in their files,
            or `""`.
        """
        frames, fps = batch["num_frames"], batch["fps"]
        captions = None
        if self.rule.mode == "scenes":
            start, end = batch[SCENE_START], batch[SCENE_END]
            clips = scene_clips(start, end, frames, fps)
            if self.caption_column is not None and _has_lists(start):
                captions = _captions_of_clips(batch[self.caption_column], clips, frames, report)
        else:
            clips = spaced_clips(self.rule, frames, fps)
        columns: dict[str, Any] = {CLIP_START: clips.start, CLIP_END: clips.end}
        for name in SIZE_COLUMNS:
            values = clips.num_frames if name == "num_frames" else np.asarray(batch[name])[clips.source]
            columns[name] = np.where(clips.wrong, CLIP_SIZE, values)
        if captions is not None and self.caption_column is not None:
            columns[self.caption_column] = captions
        return clips, columns, _problem_of(clips, batch, path) if clips.wrong.any() else ""


def repeat_rows(dataset: Dataset, source: IntArray) -> Dataset:
    """Return rows in an order in which they may repeat, without an index mapping.

    Columns of large cells, such as bytes of files, are slices of the stored ones, so that nothing of them is copied.
    """
    stored = source if dataset._indices is None else dataset._indices.column(0).to_numpy()[source]
    table = dataset.with_format(None).data.table
    columns = [_repeat(column, stored) for column in table.columns]
    repeated = InMemoryTable(pa.table(columns, schema=table.schema))
    fingerprint = Hasher.hash([dataset._fingerprint, source])
    return Dataset(repeated, info=dataset.info, split=dataset.split, fingerprint=fingerprint)


def _repeat(column: pa.ChunkedArray, rows: IntArray) -> pa.ChunkedArray:
    if column.nbytes < _LARGE_CELL * len(column):
        chunks: list[pa.Array] = []
        for part in np.array_split(rows, -(-len(rows) // 100_000)):  # a chunk of strings holds 2 GiB at most
            lowest = int(part.min())
            near = column.slice(lowest, int(part.max()) - lowest + 1)
            chunks += near.take(pa.array(part - lowest)).chunks
        return pa.chunked_array(chunks, column.type)
    begins = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    lengths = np.diff(np.append(begins, len(rows)))
    runs = (column.slice(row, length) for row, length in zip(rows[begins].tolist(), lengths.tolist(), strict=True))
    return pa.chunked_array([chunk for run in runs for chunk in run.chunks], column.type)


def _repeated(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return the row of each clip and its position among the clips of that row."""
    source = np.repeat(np.arange(len(counts)), counts)
    return source, np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)


def _scene_column(dataset: Dataset, name: str) -> pa.ChunkedArray:
    """Return a column of scenes, or raise if it holds neither numbers nor lists of numbers."""
    if name not in dataset.column_names:
        raise ColumnError(
            f"`clips` scenes reads the columns {SCENE_START} and {SCENE_END}, in seconds, but the data set has "
            f"{dataset.column_names}."
        )
    column: pa.ChunkedArray = stored_column(dataset, name)
    kind = column.type.value_type if is_list_type(column.type) else column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        raise ColumnError(f"The column {name} must hold seconds, numbers or lists of numbers; it is {column.type}.")
    return column


def _is_sequence(cell: Any) -> bool:
    return isinstance(cell, (list, tuple, np.ndarray))


def _flat(column: Sequence[Any] | pa.ChunkedArray) -> tuple[FloatArray, IntArray]:
    """Return the numbers of a column, those of the first row first, and how many each row has: none for null.

    Other values become NaN.
    """
    if not isinstance(column, pa.ChunkedArray):
        lists = [[] if cell is None else [*cell] if _is_sequence(cell) else [cell] for cell in column]
        flat = [_number(value) for values in lists for value in values]
        return np.array(flat, np.float64), np.array([len(values) for values in lists], np.int64)
    cells = column.combine_chunks()
    if isinstance(cells, pa.ChunkedArray):
        cells = pa.concat_arrays(cells.chunks) if cells.num_chunks else pa.array([], column.type)
    if is_list_type(cells.type):
        counts = pc.list_value_length(cells).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        cells = cells.flatten()
    else:
        counts = cells.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
        cells = cells.drop_null()
    return cells.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False), counts


def _number(value: Any) -> float:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return float(value) if is_number else np.nan


def _filled(values: FloatArray, counts: IntArray, rows: BoolArray, *, value: float = np.nan) -> FloatArray:
    """Return the values of all rows with one more, at the place of each of the chosen rows."""
    kept = np.where(rows, 0, counts)
    filled = np.full(int(kept.sum() + rows.sum()), value)
    filled[np.repeat(~rows, np.where(rows, 1, counts))] = values
    return filled


def _has_lists(column: Sequence[Any] | pa.ChunkedArray) -> bool:
    return is_list_type(column.type) if isinstance(column, pa.ChunkedArray) else any(map(_is_sequence, column))


def _captions_of_clips(
    cells: Sequence[Any] | pa.ChunkedArray, clips: Clips, num_frames: npt.ArrayLike, report: Report
) -> pa.Array | None:
    """Return the caption of each clip from the lists of captions of the rows; None where rows have single captions."""
    lists = cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else pa.array(cells)
    if not is_list_type(lists.type):
        return None
    counts = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    places = _caption_places(clips, counts, num_frames, report)
    return lists.flatten().take(pa.array((np.cumsum(counts) - counts)[clips.source] + places))


def _caption_places(clips: Clips, counts: IntArray, num_frames: npt.ArrayLike, report: Report) -> IntArray:
    """Return the position of each clip's caption among those of its row; report rows whose clips have not one each."""
    scenes = np.bincount(clips.source, minlength=len(counts))
    uneven = np.flatnonzero((counts != scenes) & (counts != 1) & (np.asarray(num_frames) >= 1))
    if len(uneven):
        texts = [f"row {row}: {counts[row]} captions for {scenes[row]} clips" for row in uneven[:NAMED_ROWS].tolist()]
        report(
            ColumnError(
                f"{len(uneven)} of {len(counts)} rows have neither one caption nor one for each clip: "
                f"{listed(texts, total=len(uneven))}; give each scene one caption, or the row a single one."
            )
        )
    return np.minimum(_repeated(scenes)[1], counts[clips.source] - 1)


def _problem_of(clips: Clips, batch: Mapping[str, Any], path: Callable[[int], str | None]) -> str:
    """Return how many clips are wrong, and the times, frames and files of the first rows that have some."""
    texts = []
    rows = list(dict.fromkeys(clips.source[clips.wrong].tolist()))
    for row in rows[:NAMED_ROWS]:
        start, end = (_plain_cell(batch[name][row]) for name in (SCENE_START, SCENE_END))
        fps = batch["fps"][row]
        seconds = batch["num_frames"][row] / fps if fps else 0.0
        file = path(row)
        texts.append(f"row {row}: {start} to {end} s of {seconds:.3f} s" + (f", {file}" if file is not None else ""))
    return f"{clips.wrong.sum()} clips do not lie in their files: {listed(texts, total=len(rows))}."


def _plain_cell(cell: Any) -> Any:
    return cell.as_py() if isinstance(cell, pa.Scalar) else cell
