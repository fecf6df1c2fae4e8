"""Check that what samples are shown, such as masks, exists and fits them, by the headers of the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value

from ..buckets.assignment import CONDITION_SIZE
from ..conditions.names import (
    CONDITIONS,
    FACE,
    MASK,
    MOVING,
    REFERENCE,
    all_columns,
    check_kind,
    check_length,
    check_shape,
    columns_of,
)
from ..conditions.references import REFERENCE_SIZES
from ..errors import ColumnError, MediaError
from ..media.probe import FileHeader, read_header
from ..media.rows import CLIP_START, MediaColumns
from ..settings import check_literals
from .apply import map_columns
from .arrays import SIZE_COLUMNS, arrow_type, cell_of_list, column_batches, media_kind
from .faults import NAMED_ROWS, OF_BATCH, Report, listed, path_of, paths_of, raise_error
from .settings import OnFileError

_ADVICE = ["correct these files or their paths", 'reject the rows with `on_error="reject"`']

CONDITION_FAULT = "condition_fault"
"""Column that says what is wrong with the conditions of a row."""

TRANSPARENT_CONDITIONS = "transparent_conditions"
"""Column of how many files of a row's conditions can hold transparent parts."""


@dataclass(frozen=True, slots=True)
class ConditionColumns:
    """Mark rows whose conditions are missing, unreadable or do not fit their samples, by the headers of the files.

    A batch function for `Dataset.map(batched=True)`, also on an `IterableDataset`; no frame is decoded. It comes after
    those that compute `width`, `height`, `num_frames` and `fps`, and before `BucketColumns`. Width, height and frames
    of a row that does not pass become `CONDITION_SIZE`, which every table gives the rejection `CONDITION`, and
    `condition_fault` says why; it is empty for all others. Rows that are already marked are not checked. Where
    samples have references, `reference_sizes` lists the frames, height and width of one after another, as the headers
    state them; it is empty for rows without references, and for those that do not pass. `transparent_conditions`
    counts the files of a row that can hold transparent parts.

    A condition must have its sample's aspect ratio, but for rounding each side by a pixel; a face may have any, and so
    may references, unless they lie over their sample. `first_frame` and `last_frame` are images, the others also
    videos as long as their sample, or longer if the sample is a clip of a longer video; references that do not lie
    over it may always be longer. A mask may be missing, and there may be as many references as `files.references`
    says.

    Args:
        files ([`MediaColumns`][hf_bucketing.media.MediaColumns]): Columns of the files.
        on_error (`"raise"` or `"reject"`): Whether a batch with faults stops the map, or rows are marked.

    Raises:
        ColumnError: If `on_error` is unknown.
    """

    files: MediaColumns
    on_error: OnFileError = field(default="raise", kw_only=True)
    rule_version: int = field(default=2, init=False)

    optional_columns = (CLIP_START,)
    vectorised = False
    reusable = False

    def __post_init__(self) -> None:
        check_literals(self, error=ColumnError)

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must have."""
        return (*all_columns(self.files.conditions), *SIZE_COLUMNS, "fps")

    @property
    def output_columns(self) -> tuple[str, ...]:
        """Columns that a batch gets."""
        return tuple(self.features)

    @property
    def features(self) -> Features:
        """Types of these columns."""
        types = {name: Value("int64") for name in (*SIZE_COLUMNS, TRANSPARENT_CONDITIONS)}
        types[CONDITION_FAULT] = Value("string")
        reference_sizes = {REFERENCE_SIZES: List(Value("int32"))} if REFERENCE in self.files.conditions else {}
        return Features(types | reference_sizes)

    def __call__(self, batch: Mapping[str, Sequence[Any]], report: Report = raise_error) -> dict[str, list[Any]]:
        """Return the marked sizes, what is wrong with each row, its transparent files, and the sizes of references.

        Args:
            batch (mapping of sequences of length `n`): Columns.
            report ([`Report`]): As in [`check_conditions`].

        Raises:
            MediaError: Under `on_error="raise"`, if a row does not pass; the message counts such rows and names the
                first.
        """
        columns = {name: list(batch[name]) for name in SIZE_COLUMNS}
        headers: dict[str, FileHeader] = {}
        checked = [self._read(batch, row, headers) for row in range(len(columns["width"]))]
        faults = [fault for fault, _, _ in checked]
        rows = [row for row, fault in enumerate(faults) if fault]
        if rows and self.on_error == "raise":
            first = rows[:NAMED_ROWS]
            cells = batch.get(self.files.column, [None] * len(faults))
            named = [(row, path_of(cells[row]), faults[row]) for row in first]
            report(MediaError(_summary(named, count=len(rows), total=len(faults)) + OF_BATCH, advice=_ADVICE))
        for row, fault in enumerate(faults):
            for sizes in columns.values():
                sizes[row] = CONDITION_SIZE if fault else sizes[row]
        columns[TRANSPARENT_CONDITIONS] = [transparent for _, _, transparent in checked]
        columns[CONDITION_FAULT] = faults
        if REFERENCE in self.files.conditions:
            columns[REFERENCE_SIZES] = [sizes for _, sizes, _ in checked]
        return columns

    def _read(
        self, batch: Mapping[str, Sequence[Any]], row: int, headers: dict[str, FileHeader]
    ) -> tuple[str, list[int], int]:
        """Return what is wrong with a row's conditions, or "", the sizes of its references, and its transparent files.

        `headers` are those of files that were already read.
        """
        if min(batch[name][row] for name in SIZE_COLUMNS) < 1:
            return "", [], 0
        cells = {column: batch[column][row] for column in all_columns(self.files.conditions)}
        sizes: list[int] = []
        transparent = 0
        for name, columns in self.files.conditions.items():
            files = list(self.files.cells(name, cells))
            rule = self.files.references
            if name == REFERENCE and (fault := rule.fault(len(files))):
                column, cell = files[rule.most] if len(files) > rule.most else (columns, None)
                return _in_column(": ".join(filter(None, (fault, path_of(cell)))), column), [], 0
            if not files:
                try:
                    self.files.condition(name, cells, name="it")
                except MediaError as error:
                    return _in_column(str(error), columns), [], 0
            for column, cell in files:
                try:
                    info, may_be_transparent = self._check(name, cell, batch, row, headers)
                except MediaError as error:
                    return _in_column(str(error), column), [], 0
                transparent += may_be_transparent
                if name == REFERENCE:
                    sizes += [info.num_frames, info.height, info.width]
        return "", sizes, transparent

    def _check(
        self, name: str, cell: Any, batch: Mapping[str, Sequence[Any]], row: int, headers: dict[str, FileHeader]
    ) -> FileHeader:
        """Return the header of a condition's file, after a check that it fits the sample of a row."""
        source = self.files.source(cell, name=f"{name} of it")
        if source.data is not None:
            header = read_header(source)
        elif (known := headers.get(source.path)) is not None:  # clips of one video share its conditions
            header = known
        else:
            header = headers[source.path] = read_header(source)
        info = header.info
        fps, frames = float(batch["fps"][row]), int(batch["num_frames"][row])
        check_kind(name, source.path, still=not info.fps, sample_is_image=not fps)
        if name == REFERENCE and info.fps and self.files.references.pictures_only:
            raise MediaError(f"The reference {source.path} is a video, and the model takes pictures alone.")
        if name == REFERENCE and (fault := self.files.references.shape_fault(info.height, info.width)):
            raise MediaError(f"The reference {source.path} has {fault}.")
        apart = name == REFERENCE and not self.files.references.lie_over
        if name != FACE and not apart:
            size = (int(batch["height"][row]), int(batch["width"][row]))
            check_shape(name, source.path, size=(info.height, info.width), sample=size)
        if name in MOVING and info.fps:
            start = batch[CLIP_START][row] if CLIP_START in batch else None
            check_length(
                name,
                source.path,
                num_frames=info.num_frames,
                fps=info.fps,
                first=start or 0.0,
                seconds=(frames - 1) / fps,
                step=1 / fps,
                longer=start is not None or apart,
            )
        return header


def _in_column(fault: str, column: str) -> str:
    return f"{fault.rstrip('.')} (column {column})."


def check_condition_columns(dataset: Dataset, conditions: Mapping[str, str]) -> None:
    """Raise ColumnError unless the data set has the column of each condition, with one file per row.

    Args:
        dataset (`Dataset`): Rows of a source.
        conditions (mapping of `str` to `str`): Column of each condition.
    """
    pairs = [(name, column) for name, columns in conditions.items() for column in columns_of(name, columns)]
    for name, column in pairs:
        if column not in dataset.column_names:
            raise ColumnError(f"There is no {name} column {column!r}, only {dataset.column_names}.")
        feature = dataset.features[column]
        cells = cell_of_list(feature) if name == REFERENCE else feature
        if media_kind(cells) is None and not pa.types.is_null(arrow_type(cells)):
            files = "one file, or a list of files," if name == REFERENCE else "one file"
            raise ColumnError(
                f"The {name} column {column!r} must hold {files} per row, as paths, bytes, images or videos, but it "
                f"is {feature}."
            )


def check_conditions(
    dataset: Dataset,
    columns: ConditionColumns,
    *,
    media_column: str,
    num_proc: int | None = None,
    report: Report = raise_error,
) -> tuple[Dataset, list[str]]:
    """Check the conditions of all rows, and mark those that do not pass.

    Args:
        dataset (`Dataset`): Rows with the columns of `MediaMetadata` and of conditions.
        columns ([`ConditionColumns`]): What is checked; with `on_error="raise"`, all rows before the error is raised.
        media_column (`str`): Media column, whose files messages name beside the row numbers.
        num_proc (`int`, *optional*): Number of processes that read headers.
        report (callable): Called with the error under `on_error="raise"`; by default it raises it.

    Returns:
        `tuple`: The data set, in which rows that do not pass have sizes of `CONDITION_SIZE`, and sentences on what was
        found.

    Raises:
        ColumnError: If the data set lacks a column, or it cannot hold files.
        MediaError: Under `on_error="raise"`, if a row does not pass; the message counts such rows and names the first.
    """
    conditions = columns.files.conditions
    sentences = [
        f"The column {name} is not used; --{name}_column {name} makes it the {name} of the samples."
        for name in CONDITIONS
        if name in dataset.column_names
        and name != media_column
        and name not in conditions
        and name not in all_columns(conditions)
    ]
    if not conditions:
        return dataset, sentences
    check_condition_columns(dataset, conditions)
    order = [*dataset.column_names, *([REFERENCE_SIZES] if REFERENCE in conditions else [])]
    marked = map_columns(dataset, replace(columns, on_error="reject"), num_proc=num_proc, overwrite=True)
    faults = np.concatenate(
        [pc.not_equal(cells, "").to_numpy(False) for cells in column_batches(marked, CONDITION_FAULT)]
    )
    rows = np.flatnonzero(faults)
    if len(rows):
        first = rows[:NAMED_ROWS].tolist()
        reasons = marked.select_columns([CONDITION_FAULT]).select(first)[CONDITION_FAULT]
        named = list(zip(first, paths_of(marked, first, media_column), reasons, strict=True))
        summary = _summary(named, count=len(rows), total=len(dataset))
        if columns.on_error == "raise":
            report(MediaError(summary, advice=_ADVICE))
        else:
            sentences.insert(0, summary)
    words = ", ".join(f"{name} from column {column}" for name, column in conditions.items())
    if MASK in conditions and (missing := sum(cells.null_count for cells in column_batches(marked, conditions[MASK]))):
        words += f"; {missing} {'row has' if missing == 1 else 'rows have'} no mask: all of the sample is learned"
    said = [f"Conditions: {words}."]
    if transparent := sum(pc.sum(cells).as_py() or 0 for cells in column_batches(marked, TRANSPARENT_CONDITIONS)):
        said.append(
            f"{transparent} files of conditions can hold transparent parts: those of masks are not learned, others "
            "are laid on white, or on the --background of training and caching."
        )
    if REFERENCE in conditions:
        said.append(describe_stored_references(list(column_batches(marked, REFERENCE_SIZES))))
    return marked.select_columns(list(dict.fromkeys(order))), [*said, *sentences]


def describe_stored_references(cells: Sequence[pa.Array]) -> str:
    """Return a sentence on how many rows have how many references, and of which sizes.

    Args:
        cells (sequence of Arrow arrays): Parts of the column [`REFERENCE_SIZES`].

    Example:
        >>> describe_stored_references([pa.array([[1, 64, 96], [], [1, 32, 32, 9, 64, 64]])])
        'References: 1 row has none, 1 has 1, 1 has 2; 2 pictures and 1 video of 32×32 to 96×64 pixels.'
    """
    counts = np.concatenate([pc.list_value_length(part).fill_null(0).to_numpy(False) // 3 for part in cells])
    stored = np.concatenate([part.flatten().to_numpy(False) for part in cells]).reshape(-1, 3)
    numbers, rows = (values.tolist() for values in np.unique(counts, return_counts=True))
    shares = [
        f"{count} {'has' if count == 1 else 'have'} {number or 'none'}"
        for number, count in zip(numbers, rows, strict=True)
    ]
    words = ", ".join(shares).replace(" ", " row " if rows[0] == 1 else " rows ", 1)
    if not len(stored):
        return f"References: {words}."
    pictures = int((stored[:, 0] == 1).sum())
    kinds = [(pictures, "picture"), (len(stored) - pictures, "video")]
    named = " and ".join(f"{count} {kind}{'' if count == 1 else 's'}" for count, kind in kinds if count)
    areas = stored[:, 1:].prod(1)
    least, most = (f"{width}×{height}" for height, width in stored[[areas.argmin(), areas.argmax()], 1:].tolist())
    return f"References: {words}; {named} of {least}{'' if least == most else f' to {most}'} pixels."


def _summary(named: Sequence[tuple[int, str | None, str]], *, count: int, total: int) -> str:
    """Return how many rows do not pass, and the numbers, files and faults of the first ones."""
    texts = [f"row {row}{'' if path is None else f' ({path})'}: {fault.rstrip('.')}" for row, path, fault in named]
    return f"{count} of {total} rows have conditions that do not fit: {listed(texts, total=count)}."
