"""Rows of a data set as texts: file, clip, size, what they are trained at, captions and conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..buckets.sizes import Size, cover_resize
from .text import percent, size_label

if TYPE_CHECKING:
    from ..columns.prepared import PreparedDataset

RowTexts = Mapping[str, Sequence[str]]
"""Texts of a row by what they are about."""


def describe_row(prepared: PreparedDataset, row: Mapping[str, Any], *, name: str) -> RowTexts:
    """Return what a prepared row is.

    Args:
        prepared ([`PreparedDataset`][hf_bucketing.columns.PreparedDataset]): The data set.
        row (mapping): Row of it, its files undecoded.
        name (`str`): Name of the row where its file has none.
    """
    stored = _stored_size(row)
    texts = {"file": [_path(row[prepared.column]) or name]}
    if row.get("clip_start") is not None:
        texts["clip"] = [f"{row['clip_start']:.2f}–{row['clip_end']:.2f} s"]
    rate = f", {row['fps']:g} fps" if row.get("fps") else ""
    texts["stored"] = ["no size" if stored is None else size_label(stored) + rate]
    texts["trained at"] = [_trained_at(prepared, row, stored)]
    if prepared.caption_column is not None:
        cell = row[prepared.caption_column]
        texts["caption"] = [cell] if isinstance(cell, str) else list(cell)
    for condition in prepared.conditions:
        cells = prepared.files.cells(condition, row)
        texts[condition] = [_path(cell) or f"{condition} of {name}" for _, cell in cells]
    return texts


def describe_difference(was: RowTexts, now: RowTexts, fields: Sequence[str]) -> list[str]:
    """Return in what two texts of a row differ; `fields` are those of its lock that do.

    A row of a run has no texts, and then the fields are all that is known.
    """
    if not was or not now:
        return list(fields)
    labels = [label for label in dict.fromkeys([*was, *now]) if was.get(label) != now.get(label)]
    said = [f"{label}: {_joined(was.get(label, ()))} → {_joined(now.get(label, ()))}" for label in labels]
    of_field = {"size": {"clip", "stored", "trained at"}, "caption": {"caption"}, "file": {"file"}}
    others = {*now} - set().union(*of_field.values())
    for field in fields:
        if not of_field.get(field, others) & {*labels}:
            said.append(f"{field}: {'its size in packs' if field == 'size' else 'written anew'}")
    return said


def _trained_at(prepared: PreparedDataset, row: Mapping[str, Any], stored: Size | None) -> str:
    if row.get("bucket_id", -1) < 0 or stored is None:
        rejected = f"rejected: {row.get('rejection', 'no bucket')}"
        return rejected if stored is None else f"{rejected}; packs take rows at their own size"
    target = prepared.table.size(int(row["bucket_id"]))
    height, width = cover_resize(stored.height, stored.width, target=target)
    return f"{size_label(target)}, {percent(target.height * target.width / (height * width))} of the area"


def _stored_size(row: Mapping[str, Any]) -> Size | None:
    """Return the size of a row as it is stored; None where it is not known."""
    sides = [row.get(name) or 0 for name in ("height", "width")]
    return Size(int(row.get("num_frames", 1) or 0), int(sides[0]), int(sides[1])) if min(sides) > 0 else None


def _path(cell: Any) -> str | None:
    path = cell.get("path") if isinstance(cell, Mapping) else cell
    return path if isinstance(path, str) else None


def _joined(texts: Sequence[str]) -> str:
    return " | ".join(texts) or "none"
