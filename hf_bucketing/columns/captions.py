"""Check before training that every caption of a data set is a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, Value

from ..buckets.arrays import IntArray
from ..buckets.assignment import CAPTION_SIZE
from ..errors import ColumnError
from .apply import undecoded
from .arrays import column_array, column_batches, is_text

OnCaptionError = Literal["raise", "reject", "empty"]

_NAMED_ROWS = 3

_PROBLEMS = ("missing", "empty", "a list", "a dict", "a number", "true or false", "not UTF-8 text")
_CODES = {problem: code for code, problem in enumerate(_PROBLEMS, start=1)}
_JSON_PROBLEMS = {"[": "a list", "{": "a dict", "t": "true or false", "f": "true or false", "n": "missing"}
"""Kind of a JSON value that is no string, by its first character; any other character begins a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionCheck:
    """Hold captions that are all strings, and the rows that had none.

    Args:
        dataset (`Dataset`): Rows with `""` in place of every caption that is not text; the checked data set itself if
            all its captions are texts.
        column (`str`): Text column.
        problems (mapping of `str` to `int64` arrays): Row numbers for each kind of problem, such as `"missing"`.
        rejects (`bool`): Whether [`mark`][CaptionCheck.mark] rejects these rows.
        summary (`str`): Sentence on how many captions are unusable, why, and where; `""` if all are usable.
    """

    dataset: Dataset
    column: str
    problems: Mapping[str, IntArray]
    rejects: bool
    summary: str

    @property
    def rows(self) -> IntArray:
        """Numbers of the rows without a usable caption, ascending."""
        return np.sort(np.concatenate([*self.problems.values(), np.zeros(0, np.int64)]))

    def mark(self, dataset: Dataset) -> Dataset:
        """Return the data set with unusable rows marked for rejection; unchanged unless `on_error="reject"`.

        Their width, height and number of frames become `CAPTION_SIZE`, which every table gives no tokens and the
        rejection `CAPTION`. Call this after `MediaMetadata` and before `BucketColumns`.

        Args:
            dataset (`Dataset`): The checked rows, in the same order, with the columns of `MediaMetadata`.

        Raises:
            ColumnError: If a size column is missing, or the number of rows differs.
        """
        if not self.rejects or not self.problems:
            return dataset
        names = ("width", "height", "num_frames")
        if len(dataset) != len(self.dataset) or not set(names) <= set(dataset.column_names):
            raise ColumnError(
                f"Expected the {len(self.dataset)} rows that were checked, with {', '.join(names)}; got "
                f"{len(dataset)} rows with {dataset.column_names}."
            )
        order = dataset.column_names
        for name in names:
            sizes = column_array(dataset, name).copy()
            sizes[self.rows] = CAPTION_SIZE
            dataset = dataset.remove_columns([name]).add_column(name, sizes)
        return dataset.select_columns(order)


def check_captions(
    dataset: Dataset, column: str, *, on_error: OnCaptionError = "raise", media_column: str | None = None
) -> CaptionCheck:
    """Check that a column holds one text per row, and convert bytes and JSON strings to strings.

    A caption is not text if it is missing, empty or blank, consists of bytes that are not UTF-8, or, in a column of
    mixed values, is a list, dict, number or Boolean.

    Args:
        dataset (`Dataset`): Rows with the column.
        column (`str`): Text column.
        on_error (`"raise"`, `"reject"` or `"empty"`): What to do with a caption that is not text: raise, or replace it
            by `""`; with `"reject"`, [`CaptionCheck.mark`] then rejects its row.
        media_column (`str`, *optional*): Media column, whose files messages name beside the row numbers.

    Raises:
        ColumnError: If there is no such column, `on_error` is unknown, the column cannot hold texts (a `ClassLabel`,
            numbers, lists, …), or, with `on_error="raise"`, if a caption is not text; the message counts them by kind
            and names rows and files.
    """
    if on_error not in ("raise", "reject", "empty"):
        raise ColumnError(f'`on_error` must be "raise", "reject" or "empty", got {on_error!r}.')
    if column not in dataset.column_names:
        raise ColumnError(f"The data set has no caption column {column!r}, only {dataset.column_names}.")
    feature = dataset.features[column]
    wrong = _wrong_type(feature)
    if wrong is not None:
        raise ColumnError(f"The caption column {column!r} must hold one text per row, but it is {wrong}.")
    parts = [_check(cells) for cells in column_batches(dataset, column)]
    codes = np.concatenate([code for _, code in parts] or [np.zeros(0, np.int8)])
    found = {problem: np.flatnonzero(codes == code) for problem, code in _CODES.items()}
    problems = {problem: rows for problem, rows in found.items() if len(rows)}
    summary = _summary(dataset, column, problems, media_column) if problems else ""
    if problems and on_error == "raise":
        raise ColumnError(
            summary,
            advice=[
                "write these captions",
                'leave the rows out with `on_error="reject"`',
                'train them without a text with `on_error="empty"`',
            ],
        )
    if problems or feature != Value("string"):
        order = dataset.column_names
        texts = pa.chunked_array([text for text, _ in parts], pa.string())
        dataset = dataset.remove_columns([column]).add_column(column, texts, feature=Value("string"))
        dataset = dataset.select_columns(order)
    return CaptionCheck(
        dataset=dataset, column=column, problems=problems, rejects=on_error == "reject", summary=summary
    )


def _wrong_type(feature: Any) -> str | None:
    """Return a description of a column that can hold no text, or None for other columns."""
    if isinstance(feature, ClassLabel):
        names = ", ".join(feature.names[:_NAMED_ROWS])
        return f"a ClassLabel: numbers that stand for {names}, …; name a column of texts, or make one of the labels"
    if isinstance(feature, Value):
        kind = feature.pa_type
        if is_text(feature) or pa.types.is_null(kind) or any(test(kind) for test in _BYTE_TYPES):
            return None
        return f"a column of {feature.dtype}; name a column of texts"
    if isinstance(feature, dict):
        return f"a dict with the keys {', '.join(feature)}; make a column of the one that holds the text"
    kind = type(feature).__name__
    if kind == "Json":  # values of several types, in datasets 4.6 and newer
        return None
    if kind in ("List", "LargeList", "Sequence") or isinstance(feature, list):
        return "a list of captions: several captions per row are not supported yet; name a column of one text"
    return f"a column of {kind}; name a column of texts"


_BYTE_TYPES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)


def _check(cells: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int8]]:
    """Return the captions of a batch as strings, `""` for those that are not text, and codes of their problems."""
    codes = np.zeros(len(cells), np.int8)
    if isinstance(cells, pa.ExtensionArray):
        texts = _from_json(cells.storage, codes)
    elif any(test(cells.type) for test in _BYTE_TYPES):
        texts = _from_bytes(cells, codes)
    else:
        texts = cells.cast(pa.string())
    codes[texts.is_null().to_numpy(zero_copy_only=False) & (codes == 0)] = _CODES["missing"]
    texts = texts.fill_null("")
    blank = pc.equal(pc.utf8_trim_whitespace(texts), "").to_numpy(zero_copy_only=False)
    codes[blank & (codes == 0)] = _CODES["empty"]
    return pc.if_else(pa.array(codes == 0), texts, "") if codes.any() else texts, codes


def _from_bytes(cells: pa.Array, codes: npt.NDArray[np.int8]) -> pa.Array:
    try:
        return cells.cast(pa.string())
    except pa.ArrowInvalid:  # some are not UTF-8; Arrow does not say which
        texts: list[str | None] = []
        for row, cell in enumerate(cells.to_pylist()):
            try:
                texts.append(None if cell is None else cell.decode())
            except UnicodeDecodeError:
                codes[row] = _CODES["not UTF-8 text"]
                texts.append(None)
        return pa.array(texts, pa.string())


def _from_json(cells: pa.Array, codes: npt.NDArray[np.int8]) -> pa.Array:
    texts: list[str | None] = []
    for row, cell in enumerate(cells.to_pylist()):
        if cell is None or cell.startswith('"'):
            texts.append(None if cell is None else json.loads(cell))
        else:
            codes[row] = _CODES[_JSON_PROBLEMS.get(cell[0], "a number")]
            texts.append(None)
    return pa.array(texts, pa.string())


def _summary(dataset: Dataset, column: str, problems: Mapping[str, IntArray], media_column: str | None) -> str:
    count = sum(map(len, problems.values()))
    kinds = "; ".join(
        f"{len(rows)} {problem} ({_named(dataset, rows, media_column)})" for problem, rows in problems.items()
    )
    return f"{count} of {len(dataset)} captions in the column {column!r} are not text: {kinds}."


def _named(dataset: Dataset, rows: IntArray, media_column: str | None) -> str:
    """Return the numbers and files of the first rows: `row 3: clips/a.mp4, row 8: clips/b.mp4, …`."""
    first = rows[:_NAMED_ROWS].tolist()
    names = [f"row {row}" for row in first]
    if media_column is not None:
        files = undecoded(dataset.select_columns([media_column]).select(first), [media_column])[media_column]
        paths = (cell.get("path") if isinstance(cell, dict) else cell for cell in files)
        names = [f"{name}: {path}" if isinstance(path, str) else name for name, path in zip(names, paths, strict=True)]
    return ", ".join([*names, "…"] if len(rows) > len(first) else names)
