"""Make texts of the captions of a data set, one or several per row, and find those that are not text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, Features, List, Value

from ..buckets.arrays import IntArray
from ..buckets.assignment import CAPTION_PROBLEM, CAPTION_SIZE
from ..errors import BucketingError, ColumnError
from ..settings import check_literals
from .apply import with_columns
from .arrays import SIZE_COLUMNS, column_array, column_batches, is_list_type, is_text
from .faults import NAMED_ROWS, OF_BATCH, Report, listed, path_of, paths_of, raise_error
from .settings import CAPTION, OnCaptionError, check_template

_PROBLEMS = ("missing", "empty", "a list", "a dict", "a number", "true or false", "not UTF-8 text")
_CODES = {problem: code for code, problem in enumerate(_PROBLEMS, start=1)}
_NO_TEXT = [_CODES["missing"], _CODES["empty"]]
_BYTE_TYPES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionCheck:
    """Hold captions that are all strings, and the rows that had none.

    Args:
        dataset (`Dataset`): Rows whose captions are texts, or lists of one or more texts; the checked data set itself
            if nothing had to be changed.
        column (`str`): Caption column.
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
        return np.unique(np.concatenate([*self.problems.values(), np.zeros(0, np.int64)]))

    def mark(self, dataset: Dataset) -> Dataset:
        """Return the data set with unusable rows marked for rejection; unchanged unless `on_error="reject"`.

        Their width, height and number of frames become `CAPTION_SIZE`, which every table gives no tokens and the
        rejection `CAPTION`; the column `caption_problem` says what is wrong with their captions. Call this after
        `MediaMetadata` and before `BucketColumns`.

        Args:
            dataset (`Dataset`): The checked rows, in the same order, with the columns of `MediaMetadata`.

        Raises:
            ColumnError: If a size column is missing, or the number of rows differs.
        """
        if not self.rejects or not self.problems:
            return dataset
        if len(dataset) != len(self.dataset) or not set(SIZE_COLUMNS) <= set(dataset.column_names):
            raise ColumnError(
                f"Expected the {len(self.dataset)} rows that were checked, with {', '.join(SIZE_COLUMNS)}; got "
                f"{len(dataset)} rows with {dataset.column_names}."
            )
        columns: dict[str, Any] = {}
        for name in SIZE_COLUMNS:
            columns[name] = column_array(dataset, name).copy()
            columns[name][self.rows] = CAPTION_SIZE
        problems: list[str | None] = [None] * len(dataset)
        for problem, rows in self.problems.items():
            for row in rows.tolist():
                problems[row] = problem if problems[row] is None else f"{problems[row]}, {problem}"
        return with_columns(dataset, {**columns, CAPTION_PROBLEM: pa.array(problems, pa.string())})


@dataclass(frozen=True, slots=True)
class CaptionTexts:
    """Make texts of captions: a batch function for streams, by the rules of [`check_captions`].

    For `IterableDataset.map(batched=True)`. The first column is replaced by texts, or by lists of them in a batch that
    has several per row.

    Args:
        columns (`tuple` of `str`): Caption column, or several that become one list.
        on_error (`"raise"`, `"reject"` or `"empty"`): As in [`check_captions`]. To reject rows, map this after
            `MediaMetadata`, whose columns mark them.
        template (`str`, *optional*): As in [`check_captions`].
        media_column (`str`, *optional*): As in [`check_captions`].
        audio_column (`str`, *optional*): As in [`check_captions`].

    Raises:
        ColumnError: If there is no column, `on_error` is unknown, or the template lacks its one `{caption}`.
    """

    columns: tuple[str, ...]
    on_error: OnCaptionError = field(default="raise", kw_only=True)
    template: str | None = field(default=None, kw_only=True)
    media_column: str | None = field(default=None, kw_only=True)
    audio_column: str | None = field(default=None, kw_only=True)
    rule_version: int = field(default=1, init=False)

    optional_columns = ()
    vectorised = False

    def __post_init__(self) -> None:
        check_literals(self, error=ColumnError)
        if not self.columns:
            raise ColumnError("`columns` must name at least one caption column.")
        if self.template is not None:
            check_template(self.template)

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must have."""
        named = [name for name in (self.media_column, self.audio_column) if name is not None]
        return (*self.columns, *named, *(SIZE_COLUMNS if self.on_error == "reject" else ()))

    @property
    def output_columns(self) -> tuple[str, ...]:
        """Columns that are replaced."""
        return (self.columns[0], *(SIZE_COLUMNS if self.on_error == "reject" else ()))

    def __call__(self, batch: Mapping[str, Sequence[Any]], report: Report = raise_error) -> dict[str, list[Any]]:
        """Return the columns for a batch of rows.

        Args:
            batch (mapping of sequences of length `n`): Columns.
            report ([`Report`]): As in [`check_captions`].

        Raises:
            ColumnError: Under `on_error="raise"`, for captions that are not text; the message names them.
        """
        entries = _join_entries([_of_values(batch[name]) for name in self.columns])
        rows = np.unique(entries.rows()[entries.codes > 0])
        if len(rows) and self.on_error == "raise":
            paths = None if self.media_column is None else [path_of(cell) for cell in batch[self.media_column]]
            summary = _summary(entries, self.columns, paths=None if paths is None else paths.__getitem__)
            report(ColumnError(summary + OF_BATCH, advice=caption_advice()))
        entries = entries.usable()
        if self.audio_column is not None:
            entries = entries.followed_by(_of_values(batch[self.audio_column]), column=self.audio_column)
        columns: dict[str, list[Any]] = {self.columns[0]: entries.column(self.template).to_pylist()}
        if self.on_error == "reject":
            for name in SIZE_COLUMNS:
                columns[name] = [*batch[name]]
                for row in rows.tolist():
                    columns[name][row] = CAPTION_SIZE
        return columns


def check_captions(
    dataset: Dataset,
    column: str | Sequence[str],
    *,
    on_error: OnCaptionError = "raise",
    template: str | None = None,
    media_column: str | None = None,
    audio_column: str | None = None,
    report: Report = raise_error,
) -> CaptionCheck:
    """Check that a column holds one text or a list of texts per row, and convert bytes and JSON values to strings.

    A caption is not text if it is missing, empty or blank, consists of bytes that are not UTF-8, or, in a column of
    mixed values, is a dict, number or Boolean. A list without an entry is missing.

    Args:
        dataset (`Dataset`): Rows with the column.
        column (`str` or sequence of `str`): Caption column. Several become one list, in place of the first of them; a
            row may lack a text in some, but not in all.
        on_error (`"raise"`, `"reject"` or `"empty"`): What to do with a caption that is not text: raise, or drop it
            where the row has others and else replace it by `""`; with `"reject"`, [`CaptionCheck.mark`] then rejects
            its row.
        template (`str`, *optional*): Text that each caption becomes, with `{caption}` in the caption's place, such as
            `"TOK, {caption}"`. An empty caption becomes the rest, without blanks and commas at its ends: `"TOK"`.
        media_column (`str`, *optional*): Media column, whose files messages name beside the row numbers.
        audio_column (`str`, *optional*): Column of a text about the sound of each row, which follows each of its
            captions after a blank; a row may have none.
        report (callable): Called with the error under `on_error="raise"`; by default it raises it. If it returns,
            captions that are not text are as with `"empty"`.

    Raises:
        ColumnError: If there is no such column, `on_error` is unknown, the template lacks its one `{caption}`, the
            column cannot hold texts (a `ClassLabel`, numbers, dicts, …), or, with `on_error="raise"`, if a caption is
            not text; the message counts them by kind and names rows and files.
    """
    columns = [column] if isinstance(column, str) else [*column]
    CaptionTexts(tuple(columns), on_error=on_error, template=template)
    of_audio = [] if audio_column is None else [audio_column]
    for name in (*columns, *of_audio):
        _check_type(dataset, name)
    parts = [
        _join_entries([_of_cells(cells[name]) for name in columns])
        for cells in _batches(dataset.select_columns(list(dict.fromkeys(columns))), columns)
    ]
    entries = _concatenate(parts)
    problems = {
        problem: np.unique(entries.rows()[entries.codes == code])
        for problem, code in _CODES.items()
        if (entries.codes == code).any()
    }
    paths = None if media_column is None else lambda row: paths_of(dataset, [row], media_column)[0]
    summary = _summary(entries, columns, paths=paths) if problems else ""
    if problems and on_error == "raise":
        report(ColumnError(summary, advice=caption_advice()))
    feature = List(Value("string")) if entries.several else Value("string")
    changed = template is not None or audio_column is not None or len(columns) > 1
    if problems or changed or dataset.features[columns[0]] != feature:
        usable = [part.usable() for part in parts]
        if audio_column is not None:
            pairs = zip(usable, column_batches(dataset, audio_column), strict=True)
            usable = [part.followed_by(_of_cells(cells), column=audio_column) for part, cells in pairs]
        texts = pa.chunked_array([part.column(template, several=entries.several) for part in usable])
        dataset = with_columns(dataset, {columns[0]: texts}, features=Features({columns[0]: feature}))
    return CaptionCheck(
        dataset=dataset, column=columns[0], problems=problems, rejects=on_error == "reject", summary=summary
    )


def all_texts(dataset: Dataset, column: str) -> list[str]:
    """Return each distinct caption of a checked column once, of a row with several each of them."""
    distinct = pc.unique(pa.chunked_array([_of_cells(cells).texts for cells in column_batches(dataset, column)]))
    texts: list[str] = distinct.to_pylist()
    return texts


def caption_advice(setting: str = "on_error") -> list[str]:
    """Return what to do about captions that are not text, with the name of the setting that decides it."""
    return [
        "write these captions",
        f'leave the rows out with `{setting}="reject"`',
        f'train them without a text with `{setting}="empty"`',
    ]


def for_source(error: BucketingError) -> ColumnError:
    """Return the error of a check of captions with the name that its setting has among those of a source."""
    return ColumnError(error.fact, advice=caption_advice("on_caption_error"))


class _Entries(NamedTuple):
    """Captions of rows, those of the first row first.

    Attributes:
        texts: Strings of shape `(m,)`, `""` for what is not text.
        codes: Problem of each, `(m,)`, 0 for none.
        counts: Captions of each row, `(n,)`, at least 1.
        several: Whether a row has a list of captions.
    """

    texts: pa.Array | pa.ChunkedArray
    codes: npt.NDArray[np.int8]
    counts: IntArray
    several: bool

    def rows(self) -> IntArray:
        """Return the row of each caption, `(m,)`."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def select(self, keep: npt.NDArray[np.bool_]) -> _Entries:
        """Return some of the captions; every row must keep one."""
        if keep.all():
            return self
        counts = np.bincount(self.rows()[keep], minlength=len(self.counts))
        return _Entries(self.texts.filter(pa.array(keep)), self.codes[keep], counts, self.several)

    def usable(self) -> _Entries:
        """Return the captions that are texts, and one empty caption of each row that has none."""
        starts = np.cumsum(self.counts) - self.counts
        good = self.codes == 0
        none = np.add.reduceat(good, starts, dtype=np.int64) == 0 if len(starts) else np.zeros(0, bool)
        keep = good.copy()
        keep[starts[none]] = True
        return self.select(keep)

    def followed_by(self, audio: _Entries, *, column: str) -> _Entries:
        """Return these captions, each followed by the text about its row's sound, if there is one.

        Raises:
            ColumnError: If a row has something else in that column, such as a list.
        """
        wrong = np.flatnonzero(~np.isin(audio.codes, [0, *_NO_TEXT]))
        if audio.several or len(wrong):
            what = "a list" if audio.several else _PROBLEMS[audio.codes[wrong[0]] - 1]
            raise ColumnError(
                f"The column {column!r} must hold one text about the sound of each row, or none; got {what}."
            )
        texts = self.texts.combine_chunks() if isinstance(self.texts, pa.ChunkedArray) else self.texts
        sound_texts = audio.texts.take(pa.array(self.rows()))
        joined = pc.utf8_trim_whitespace(pc.binary_join_element_wise(texts, sound_texts, " "))
        return self._replace(texts=pc.if_else(pc.equal(sound_texts, ""), texts, joined))

    def column(self, template: str | None, *, several: bool | None = None) -> pa.Array:
        """Return the texts in the template, of shape `(n,)`: strings, or lists of strings."""
        texts = self.texts
        if template is not None:
            before, after = template.split(CAPTION)
            filled = pc.binary_join_element_wise(before, texts, after, "")
            texts = pc.if_else(pc.equal(texts, ""), (before + after).strip(" ,"), filled)
        if not (self.several if several is None else several):
            return texts
        offsets = np.concatenate([[0], np.cumsum(self.counts)])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), texts)


def _join_entries(columns: Sequence[_Entries]) -> _Entries:
    """Put the captions of several columns of the same rows together; a row may lack a text in some of them."""
    if len(columns) == 1:
        return columns[0]
    order = np.argsort(np.concatenate([entries.rows() for entries in columns]), kind="stable")
    joined = _Entries(
        pa.concat_arrays([entries.texts for entries in columns]).take(pa.array(order)),
        np.concatenate([entries.codes for entries in columns])[order],
        np.sum([entries.counts for entries in columns], axis=0),
        several=True,
    )
    absent = np.isin(joined.codes, _NO_TEXT)
    starts = np.cumsum(joined.counts) - joined.counts
    lacks_all = np.logical_and.reduceat(absent, starts) if len(starts) else np.zeros(0, bool)
    keep = ~absent
    keep[starts[lacks_all]] = True
    return joined.select(keep)


def _concatenate(parts: Sequence[_Entries]) -> _Entries:
    return _Entries(
        pa.chunked_array([part.texts for part in parts], pa.string()),
        np.concatenate([np.zeros(0, np.int8), *(part.codes for part in parts)]),
        np.concatenate([np.zeros(0, np.int64), *(part.counts for part in parts)]),
        any(part.several for part in parts),
    )


def _batches(dataset: Dataset, columns: Sequence[str]) -> Iterator[dict[str, pa.Array]]:
    """Yield batches of the columns, each as one Arrow array."""
    for cells in zip(*(column_batches(dataset, name) for name in columns), strict=True):
        yield dict(zip(columns, cells, strict=True))


def _check_type(dataset: Dataset, column: str) -> None:
    if column not in dataset.column_names:
        raise ColumnError(f"The data set has no caption column {column!r}, only {dataset.column_names}.")
    wrong = _wrong_type(dataset.features[column])
    if wrong is not None:
        raise ColumnError(f"The caption column {column!r} must hold texts, but it is {wrong}.")


def _wrong_type(feature: Any) -> str | None:
    """Return a description of a column that can hold no text, or None for other columns."""
    if isinstance(feature, ClassLabel):
        names = ", ".join(feature.names[:NAMED_ROWS])
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
    if _is_list(feature):
        inner = feature[0] if isinstance(feature, list) else feature.feature
        wrong = "a list; name a column of one list" if _is_list(inner) else _wrong_type(inner)
        return None if wrong is None else f"a list whose entries are not texts: each is {wrong}"
    return f"a column of {kind}; name a column of texts"


def _is_list(feature: Any) -> bool:
    return type(feature).__name__ in ("List", "LargeList", "Sequence", "list")


def _of_cells(cells: pa.Array) -> _Entries:
    """Return the captions of a batch of an Arrow column."""
    if isinstance(cells, pa.ExtensionArray):
        return _of_values([None if cell is None else json.loads(cell) for cell in cells.storage.to_pylist()])
    if not is_list_type(cells.type):
        return _Entries(*_texts(cells), np.ones(len(cells), np.int64), several=False)
    inner = cells.flatten()
    if isinstance(inner, pa.ExtensionArray):
        return _of_values([None if cell is None else [*map(_loads, cell)] for cell in cells.to_pylist()])
    lengths = pc.list_value_length(cells).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    texts, codes = _texts(inner)
    if lengths.all():
        return _Entries(texts, codes, lengths, several=True)
    counts = np.maximum(lengths, 1)  # a row without captions has one that is missing
    present = np.repeat(lengths > 0, counts)
    source = np.cumsum(present) - 1
    all_codes = np.full(len(present), _CODES["missing"], np.int8)
    all_codes[present] = codes
    all_texts = texts.take(pa.array(source, mask=~present)).fill_null("")
    return _Entries(all_texts, all_codes, counts, several=True)


def _loads(cell: Any) -> Any:
    return json.loads(cell) if isinstance(cell, str) else cell


def _texts(cells: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int8]]:
    """Return texts or bytes as strings, `""` for those that are not text, and codes of their problems."""
    codes = np.zeros(len(cells), np.int8)
    texts = _from_bytes(cells, codes) if any(test(cells.type) for test in _BYTE_TYPES) else cells.cast(pa.string())
    codes[texts.is_null().to_numpy(zero_copy_only=False) & (codes == 0)] = _CODES["missing"]
    texts = texts.fill_null("")
    blank = pc.equal(pc.utf8_trim_whitespace(texts), "").to_numpy(zero_copy_only=False)
    codes[blank & (codes == 0)] = _CODES["empty"]
    return pc.if_else(pa.array(codes == 0), texts, "") if codes.any() else texts, codes


def _from_bytes(cells: pa.Array, codes: npt.NDArray[np.int8]) -> pa.Array:
    try:
        return cells.cast(pa.string())
    except pa.ArrowInvalid:  # some are not UTF-8; Arrow does not say which
        texts, problems = zip(*map(_text_of, cells.to_pylist()), strict=True)
        codes[:] = problems
        return pa.array(texts, pa.string())


def _of_values(values: Sequence[Any]) -> _Entries:
    """Return the captions of a batch of Python values of any types."""
    lists = [[*value] if isinstance(value, (list, tuple, np.ndarray)) else [value] for value in values]
    pairs = [_text_of(value) for several in lists for value in several or [None]]
    texts, codes = zip(*pairs, strict=True) if pairs else ((), ())
    return _Entries(
        pa.array(texts, pa.string()).fill_null(""),
        np.array(codes, np.int8),
        np.array([max(len(several), 1) for several in lists], np.int64),
        several=any(isinstance(value, (list, tuple, np.ndarray)) for value in values),
    )


def _text_of(value: Any) -> tuple[str | None, int]:
    """Return a value as text and 0, or None and the code of its problem."""
    problem = "a number"
    if isinstance(value, (bytes, bytearray)):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            return None, _CODES["not UTF-8 text"]
    if isinstance(value, str):
        return (value, 0) if value.strip() else (None, _CODES["empty"])
    kinds = {dict: "a dict", list: "a list", tuple: "a list", np.ndarray: "a list", bool: "true or false"}
    problem = "missing" if value is None else kinds.get(type(value), "a number")
    return None, _CODES[problem]


def _summary(entries: _Entries, columns: Sequence[str], *, paths: Callable[[int], str | None] | None) -> str:
    """Return what is wrong with captions, and the first rows of each kind, with the paths of their files."""
    rows = entries.rows()
    position = np.arange(len(rows)) - np.repeat(np.cumsum(entries.counts) - entries.counts, entries.counts)
    kinds = []
    for problem, code in _CODES.items():
        matches = np.flatnonzero(entries.codes == code)
        if not len(matches):
            continue
        first = matches[:NAMED_ROWS]
        names = [f"row {row}" for row in rows[first].tolist()]
        if entries.several:
            names = [f"{name} caption {number}" for name, number in zip(names, position[first].tolist(), strict=True)]
        if paths is not None:
            files = map(paths, rows[first].tolist())
            names = [f"{name}: {file}" if file else name for name, file in zip(names, files, strict=True)]
        kinds.append(f"{len(matches)} {problem} ({listed(names, total=len(matches), separator=', ')})")
    named = " and ".join(map(repr, columns))
    of_column = f"column {named}" if len(columns) == 1 else f"columns {named}"
    wrong = np.count_nonzero(entries.codes)
    return f"{wrong} of {len(rows)} captions in the {of_column} are not text: {'; '.join(kinds)}."
