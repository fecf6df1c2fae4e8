"""Check that every caption of a data set is a text, before anything is trained on it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
from .arrays import is_text

OnCaptionError = Literal["raise", "reject", "empty"]

_ROWS_PER_BATCH = 100_000
_NAMED_ROWS = 3

_PROBLEMS = ("missing", "empty", "a list", "a dict", "a number", "true or false", "not UTF-8 text")
_CODES = {problem: code for code, problem in enumerate(_PROBLEMS, start=1)}
_JSON_PROBLEMS = {"[": "a list", "{": "a dict", "t": "true or false", "f": "true or false", "n": "missing"}
"""What a value of JSON that is no string is, by its first character; anything else is a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionCheck:
    """Captions that are all strings, and the rows where they were not.

    Args:
        dataset (`Dataset`): The rows, with `""` for every caption that is no text. The very one that was checked, if
            all its captions are.
        column (`str`): Text column.
        problems (mapping of `str` to `int64` arrays): Rows by what is wrong with their caption, such as `"missing"`.
        rejects (`bool`): Whether [`mark`][CaptionCheck.mark] rejects these rows.
        summary (`str`): How many captions are unusable, why, and where, for messages; `""` if there is none.
    """

    dataset: Dataset
    column: str
    problems: Mapping[str, IntArray]
    rejects: bool
    summary: str

    @property
    def rows(self) -> IntArray:
        """The rows without a usable caption, ascending."""
        return np.sort(np.concatenate([*self.problems.values(), np.zeros(0, np.int64)]))

    def mark(self, dataset: Dataset) -> Dataset:
        """Return the data set with the rows marked for rejection under `on_error="reject"`, or else as it is.

        Their width, height and number of frames become `CAPTION_SIZE`, which has no tokens and the rejection `CAPTION`
        in every table. Call it when these columns are there, and before `BucketColumns`.

        Args:
            dataset (`Dataset`): The checked rows, in their order, with the columns of `MediaMetadata`.

        Raises:
            ColumnError: If a size column is missing, or there are other rows.
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
            sizes = np.array(dataset[name][:])  # of a list: numpy would read a Column row by row
            sizes[self.rows] = CAPTION_SIZE
            dataset = dataset.remove_columns([name]).add_column(name, sizes)
        return dataset.select_columns(order)


def check_captions(
    dataset: Dataset, column: str, *, on_error: OnCaptionError = "raise", media_column: str | None = None
) -> CaptionCheck:
    """Check that a column holds a text per row, and make strings of bytes and JSON that are texts.

    A caption is no text if it is missing, empty or blank, bytes that are not UTF-8, or, in a column of mixed values, a
    list, dict, number or truth value.

    Args:
        dataset (`Dataset`): With the column.
        column (`str`): Text column.
        on_error (`"raise"`, `"reject"` or `"empty"`): Whether a caption that is no text is an error, or becomes `""`;
            with `"reject"`, [`CaptionCheck.mark`] then rejects its row.
        media_column (`str`, *optional*): Column whose files messages name beside the row numbers.

    Raises:
        ColumnError: If there is no such column, `on_error` is unknown, the type of the whole column is none of text
            (a `ClassLabel`, numbers, lists, …), or, under `on_error="raise"`, if a caption is no text; the message
            counts them by kind and names rows and files.
    """
    if on_error not in ("raise", "reject", "empty"):
        raise ColumnError(f'on_error must be "raise", "reject" or "empty", got {on_error!r}.')
    if column not in dataset.column_names:
        raise ColumnError(f"The data set has no caption column {column!r}, only {dataset.column_names}.")
    feature = dataset.features[column]
    wrong = _wrong_type(feature)
    if wrong is not None:
        raise ColumnError(f"The caption column {column!r} must hold one text per row, but it is {wrong}.")
    parts = [_check(cells) for cells in _batches(dataset, column)]
    codes = np.concatenate([code for _, code in parts] or [np.zeros(0, np.int8)])
    found = {problem: np.flatnonzero(codes == code) for problem, code in _CODES.items()}
    problems = {problem: rows for problem, rows in found.items() if len(rows)}
    summary = _summary(dataset, column, problems, media_column) if problems else ""
    if problems and on_error == "raise":
        raise ColumnError(
            f"{summary} Write these captions, or choose on_error reject, which leaves the rows out, or empty, which "
            "trains them without a text."
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
    """Return what a column is in which no value can be a text, or None."""
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


def _batches(dataset: Dataset, column: str) -> Iterator[pa.Array]:
    rows = dataset.select_columns([column]).with_format("arrow")
    for batch in rows.iter(batch_size=_ROWS_PER_BATCH):
        cells = batch[column].combine_chunks()
        yield from cells.chunks if isinstance(cells, pa.ChunkedArray) else [cells]


def _check(cells: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int8]]:
    """Return the captions of a batch as strings, `""` where they are no text, and the code of each problem, or 0."""
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
    except pa.ArrowInvalid:  # some are not UTF-8, which Arrow does not name
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
    return f"{count} of {len(dataset)} captions in the column {column!r} are no text: {kinds}."


def _named(dataset: Dataset, rows: IntArray, media_column: str | None) -> str:
    """Return the first rows by number and file: `row 3: clips/a.mp4, row 8: clips/b.mp4, …`."""
    first = rows[:_NAMED_ROWS].tolist()
    names = [f"row {row}" for row in first]
    if media_column is not None:
        files = undecoded(dataset.select_columns([media_column]).select(first), [media_column])[media_column]
        paths = (cell.get("path") if isinstance(cell, dict) else cell for cell in files)
        names = [f"{name}: {path}" if isinstance(path, str) else name for name, path in zip(names, paths, strict=True)]
    return ", ".join([*names, "…"] if len(rows) > len(first) else names)
