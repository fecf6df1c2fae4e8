"""Check that what samples are shown, such as masks, exists and fits them, by the headers of the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from ..buckets.assignment import CONDITION_SIZE
from ..errors import ColumnError, MediaError
from ..media.conditions import (
    CONDITIONS,
    FRAME_BY_FRAME,
    MASK,
    check_kind,
    check_length,
    check_shape,
)
from ..media.probe import MediaInfo, probe
from ..media.rows import CLIP_START, MediaColumns
from ..settings import check_literals
from .apply import map_columns
from .arrays import SIZE_COLUMNS, arrow_type, column_batches, media_kind
from .faults import NAMED_ROWS, OF_BATCH, Report, listed, path_of, paths_of, raise_error
from .settings import OnFileError

_ADVICE = ["correct these files or their paths", 'reject the rows with `on_error="reject"`']

CONDITION_FAULT = "condition_fault"
"""Column that says what is wrong with the conditions of a row."""


@dataclass(frozen=True, slots=True)
class ConditionColumns:
    """Mark rows whose conditions are missing, unreadable or do not fit their samples, by the headers of the files.

    A batch function for `Dataset.map(batched=True)`, also on an `IterableDataset`; no frame is decoded. It comes after
    those that compute `width`, `height`, `num_frames` and `fps`, and before `BucketColumns`. Width, height and frames
    of a row that does not pass become `CONDITION_SIZE`, which every table gives the rejection `CONDITION`, and
    `condition_fault` says why; it is empty for all others. Rows that are already marked are not checked.

    A condition must have its sample's aspect ratio, but for rounding each side by a pixel; references may have any.
    `first_frame`, `last_frame` and `reference` are images, `control` and `mask` also videos as long as their sample,
    or longer if the sample is a clip of a longer video. Only a mask may be missing.

    Args:
        files ([`MediaColumns`][hf_bucketing.media.MediaColumns]): Columns of the files.
        on_error (`"raise"` or `"reject"`): Whether a batch with faults stops the map, or rows are marked.

    Raises:
        ColumnError: If `on_error` is unknown.
    """

    files: MediaColumns
    on_error: OnFileError = field(default="raise", kw_only=True)
    rule_version: int = field(default=1, init=False)

    optional_columns = (CLIP_START,)
    output_columns = (*SIZE_COLUMNS, CONDITION_FAULT)
    vectorised = False
    reusable = False

    def __post_init__(self) -> None:
        check_literals(self, error=ColumnError)

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must have."""
        return (*self.files.conditions.values(), *SIZE_COLUMNS, "fps")

    def __call__(self, batch: Mapping[str, Sequence[Any]], report: Report = raise_error) -> dict[str, list[Any]]:
        """Return the marked sizes, and what is wrong with each row.

        Args:
            batch (mapping of sequences of length `n`): Columns.
            report ([`Report`]): As in [`check_conditions`].

        Raises:
            MediaError: Under `on_error="raise"`, if a row does not pass; the message counts such rows and names the
                first.
        """
        columns = {name: list(batch[name]) for name in SIZE_COLUMNS}
        headers: dict[str, MediaInfo] = {}
        faults = [self._fault(batch, row, headers) for row in range(len(columns["width"]))]
        rows = [row for row, fault in enumerate(faults) if fault]
        if rows and self.on_error == "raise":
            first = rows[:NAMED_ROWS]
            cells = batch.get(self.files.column, [None] * len(faults))
            named = [(row, path_of(cells[row]), faults[row]) for row in first]
            report(MediaError(_summary(named, count=len(rows), total=len(faults)) + OF_BATCH, advice=_ADVICE))
        for row, fault in enumerate(faults):
            for sizes in columns.values():
                sizes[row] = CONDITION_SIZE if fault else sizes[row]
        return {**columns, CONDITION_FAULT: faults}

    def _fault(self, batch: Mapping[str, Sequence[Any]], row: int, headers: dict[str, MediaInfo]) -> str:
        """Return what is wrong with the conditions of a row, or ""; `headers` are those of files already read."""
        if min(batch[name][row] for name in SIZE_COLUMNS) < 1:
            return ""
        try:
            for name, column in self.files.conditions.items():
                self._check(name, batch[column][row], batch, row, headers)
        except MediaError as error:
            return str(error)
        return ""

    def _check(
        self, name: str, cell: Any, batch: Mapping[str, Sequence[Any]], row: int, headers: dict[str, MediaInfo]
    ) -> None:
        source = self.files.condition(name, cell, name="it")
        if source is None:
            return
        if source.data is not None:
            found = probe(source)
        elif (known := headers.get(source.path)) is not None:  # clips of one video share its conditions
            found = known
        else:
            found = headers[source.path] = probe(source)
        fps, frames = float(batch["fps"][row]), int(batch["num_frames"][row])
        check_kind(name, source.path, still=not found.fps, sample_is_image=not fps)
        size = (int(batch["height"][row]), int(batch["width"][row]))
        check_shape(name, source.path, size=(found.height, found.width), sample=size)
        if name in FRAME_BY_FRAME and found.fps:
            start = batch[CLIP_START][row] if CLIP_START in batch else None
            check_length(
                name,
                source.path,
                num_frames=found.num_frames,
                fps=found.fps,
                first=start or 0.0,
                seconds=(frames - 1) / fps,
                step=1 / fps,
                is_clip=start is not None,
            )


def check_condition_columns(dataset: Dataset, conditions: Mapping[str, str]) -> None:
    """Raise ColumnError unless the data set has the column of each condition, with one file per row.

    Args:
        dataset (`Dataset`): Rows of a source.
        conditions (mapping of `str` to `str`): Column of each condition.
    """
    for name, column in conditions.items():
        if column not in dataset.column_names:
            raise ColumnError(f"There is no {name} column {column!r}, only {dataset.column_names}.")
        feature = dataset.features[column]
        if media_kind(feature) is None and not pa.types.is_null(arrow_type(feature)):
            raise ColumnError(
                f"The {name} column {column!r} must hold one file per row, as paths, bytes, images or videos, but it "
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
    given = columns.files.conditions
    sentences = [
        f"The column {name} is not used; --{name}_column {name} makes it the {name} of the samples."
        for name in CONDITIONS
        if name in dataset.column_names and name != media_column and name not in given and name not in given.values()
    ]
    if not given:
        return dataset, sentences
    check_condition_columns(dataset, given)
    order = dataset.column_names
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
    words = ", ".join(f"{name} from column {column}" for name, column in given.items())
    if MASK in given and (missing := sum(cells.null_count for cells in column_batches(marked, given[MASK]))):
        words += f"; {missing} {'row has' if missing == 1 else 'rows have'} no mask: all of the sample is learned"
    return marked.select_columns(order), [f"Conditions: {words}.", *sentences]


def _summary(named: Sequence[tuple[int, str | None, str]], *, count: int, total: int) -> str:
    """Return how many rows do not pass, and the numbers, files and faults of the first ones."""
    texts = [f"row {row}{'' if path is None else f' ({path})'}: {fault.rstrip('.')}" for row, path, fault in named]
    return f"{count} of {total} rows have conditions that do not fit: {listed(texts, total=count)}."
