"""The rows of a data set as texts and as a page: what a model will see of each, and what changed in them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..buckets.assignment import CAPTION_PROBLEM
from ..buckets.kept import kept_area
from ..buckets.sizes import Size
from .page import Block, Facts, Page, Paragraphs, RowList, Section
from .text import percent, size_label

if TYPE_CHECKING:
    from ..columns.prepared import PreparedDataset
    from ..media.probe import MediaInfo

RowTexts = Mapping[str, Sequence[str]]
"""Texts of a row by what they are about."""


_READ_AS = "read as"


def describe_row(prepared: PreparedDataset, row: Mapping[str, Any], *, name: str) -> RowTexts:
    """Return what a prepared row is.

    "Read as" is its size in the columns: frames at the frame rate of training, which a video may be stored at or not.

    Args:
        prepared ([`PreparedDataset`][hf_bucketing.columns.PreparedDataset]): The data set.
        row (mapping): Row of it, its files undecoded.
        name (`str`): Name of the row where its file has none.
    """
    size = _size_of(row)
    texts = {"file": [_path(row[prepared.column]) or name]}
    if row.get("clip_start") is not None:
        texts["clip"] = [f"{row['clip_start']:.2f}–{row['clip_end']:.2f} s"]
    if size is not None:
        texts[_READ_AS] = [_label(size, row.get("fps") or 0.0)]
    texts["trained at"] = [_trained_at(prepared, row, size)]
    if prepared.caption_column is not None:
        cell = row[prepared.caption_column]
        texts["caption"] = [cell] if isinstance(cell, str) else list(cell)
    for condition in prepared.conditions:
        cells = prepared.files.cells(condition, row)
        texts[condition] = [_path(cell) or f"{condition} of {name}" for _, cell in cells]
    return texts


def with_stored(texts: RowTexts, info: MediaInfo) -> RowTexts:
    """Return the texts of a row with the size, frames and frame rate that its file's header states.

    What it is read as is omitted where that is the same.
    """
    stored = [_label(Size(info.num_frames, info.height, info.width), info.fps)]
    others = {label: lines for label, lines in texts.items() if (label, lines) != (_READ_AS, stored)}
    return {"file": others.pop("file"), "stored": stored, **others}


def describe_difference(was: RowTexts, now: RowTexts, fields: Sequence[str]) -> list[str]:
    """Return in what two texts of a row differ; `fields` are those of its lock that do.

    A row of a run has no texts, and then the fields are all that is known.
    """
    if not was or not now:
        return list(fields)
    labels = [label for label in dict.fromkeys([*was, *now]) if was.get(label) != now.get(label)]
    said = [f"{label}: {_joined(was.get(label, ()))} → {_joined(now.get(label, ()))}" for label in labels]
    of_field = {"size": {"clip", _READ_AS, "trained at"}, "caption": {"caption"}, "file": {"file"}}
    others = {*now} - set().union(*of_field.values())
    for field in fields:
        if not of_field.get(field, others) & {*labels}:
            said.append(f"{field}: {'its size in packs' if field == 'size' else 'written anew'}")
    return said


def _label(size: Size, fps: float) -> str:
    return f"{size_label(size)} at {fps:g} fps" if fps and size.frames > 1 else size_label(size)


def _trained_at(prepared: PreparedDataset, row: Mapping[str, Any], size: Size | None) -> str:
    if row.get("bucket_id", -1) < 0 or size is None:
        problem = row.get(CAPTION_PROBLEM)
        rejected = f"rejected: {row.get('rejection', 'no bucket')}{f' ({problem})' if problem else ''}"
        return rejected if size is None else f"{rejected}; packs take rows at their own size"
    target = prepared.table.size(int(row["bucket_id"]))
    kept = float(kept_area(size.height, size.width, target_heights=target.height, target_widths=target.width))
    frames = f", {target.frames:,} of {size.frames:,} frames" if size.frames > 1 else ""
    return f"{size_label(target)}, keeps {percent(kept)} of the area{frames}"


def _size_of(row: Mapping[str, Any]) -> Size | None:
    """Return the size of a row in its columns; None where it is not known."""
    sides = [row.get(name) or 0 for name in ("height", "width")]
    return Size(int(row.get("num_frames", 1) or 0), int(sides[0]), int(sides[1])) if min(sides) > 0 else None


def _path(cell: Any) -> str | None:
    path = cell.get("path") if isinstance(cell, Mapping) else cell
    return path if isinstance(path, str) else None


def _joined(texts: Sequence[str]) -> str:
    return " | ".join(texts) or "none"


_ROWS_OF_A_SCRIPT = 1000

FILTERS = ("bucket", "rejected", "source", "change")
"""What readers can filter rows by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """A row of a page.

    Attributes:
        number (`int`, *optional*): Its number; None for a row of an earlier data set.
        texts (mapping of `str` to sequence of `str`): What [`describe_row`] says of it.
        filters (mapping of `str` to `str`): Its value of each of `FILTERS`, `""` where it has none.
        differences (sequence of `str`): In what it differs from an earlier data set.
        pictures (sequence of tuples): What each picture is, its file, width and height in pixels.
        fault (`str`): Why it has no picture, if its files cannot be read.
    """

    number: int | None
    texts: RowTexts
    filters: dict[str, str]
    differences: Sequence[str] = ()
    pictures: Sequence[tuple[str, str, int, int]] = ()
    fault: str = ""


def write_rows(rows: Sequence[DataRow], folder: Path) -> None:
    """Write rows into the scripts that [`data_page`] names, from which a page reads them without a server."""
    for number, name in enumerate(_scripts(rows)):
        part = rows[number * _ROWS_OF_A_SCRIPT : (number + 1) * _ROWS_OF_A_SCRIPT]
        lines = ",\n".join(json.dumps(asdict(row)) for row in part)
        (folder / name).write_text(f"rows.push(\n{lines}\n)\n", encoding="utf-8")


def data_page(
    rows: Sequence[DataRow],
    *,
    name: str,
    folder: str,
    num_rows: int,
    kept_area: float,
    changes: str,
    cached: str = "",
) -> Page:
    """Lay out a page of rows.

    Args:
        rows (sequence of [`DataRow`]): Rows that are shown.
        name (`str`): Name of the data set.
        folder (`str`): Name of the folder beside the page that holds the scripts and pictures.
        num_rows (`int`): Rows of the data set.
        kept_area (`float`): Mean kept area of all that have a bucket, NaN if none has one.
        changes (`str`): Sentence on what changed since an earlier data set; `""` without one.
        cached (`str`): What a cache holds of the rows; `""` without one.
    """
    present = [row for row in rows if row.number is not None]
    counts = {filter: Counter(row.filters[filter] for row in rows if row.filters[filter]) for filter in FILTERS}
    facts = [
        ("rows", f"{num_rows:,}"),
        ("rows shown", f"{len(present):,}"),
        ("of them rejected", f"{counts['rejected'].total():,}"),
        ("of them with pictures", f"{sum(bool(row.pictures) for row in present):,}"),
        ("kept area, mean", percent(kept_area)),
    ]
    if cached:
        facts.append(("cached", cached))
    if changes:
        facts.append(("changes shown", f"{counts['change'].total():,}"))
    texts = [
        "Pictures are cut as the model will see them in buckets, with the crop in the centre; with random crops, "
        "training moves it along the side that is cut. Packs take samples whole. Rejected rows are shown whole."
    ]
    if len(present) < num_rows:
        texts.append(
            f"Of {num_rows:,} rows, {len(present):,} are shown: those that changed, and others spread evenly "
            "(--max_rows)."
        )
    url = quote(folder)
    row_list = RowList(
        scripts=[f"{url}/{script}" for script in _scripts(rows)],
        pictures=url,
        filters={filter: _in_order(values) for filter, values in counts.items() if values},
    )
    overview: list[Block] = [Facts(facts=facts), Paragraphs(texts=texts)]
    sections = [
        Section(name="overview", title="Overview", blocks=overview),
        Section(name="changes", title="Changes", blocks=[Paragraphs(texts=[changes])] if changes else []),
        Section(name="list", title="Rows", blocks=[row_list]),
    ]
    return Page(title="The data", subtitle=f"{name}: what a model will see of each row.", sections=sections)


def _in_order(values: Counter[str]) -> list[str]:
    """Return values from the most frequent one on."""
    return [value for value, _ in values.most_common()]


def _scripts(rows: Sequence[DataRow]) -> list[str]:
    return [f"rows-{number}.js" for number in range(max(1, -(-len(rows) // _ROWS_OF_A_SCRIPT)))]
