"""Columns of the rows of a stream, computed as they come: media, caption, size, bucket and identity."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..buckets.assignment import REJECTED_BUCKET
from ..conditions.audio import HAS_AUDIO
from ..conditions.names import REFERENCE, all_columns, columns_of
from ..conditions.references import REFERENCE_SIZES, ReferenceRule
from ..media import references as references_before
from ..media.remote import is_url
from ..media.rows import CLIP_END, CLIP_START, REGULARIZATION, SOURCE_COLUMN, MediaColumns
from ..randomness import ROW
from .audio import AudioColumns
from .buckets import BucketColumns
from .captions import CaptionTexts, for_source
from .clips import SCENE_END, SCENE_START, ClipRows
from .conditions import ConditionColumns
from .faults import Faults, path_of
from .metadata import SIZES, ExistingMetadata, MediaMetadata
from .settings import RowsConfig, read_size_columns
from .sources import named_cell

MEDIA = "media"
"""Column of paths, or of dictionaries of path and bytes."""

CAPTION = "caption"
"""Column of texts, or of lists of texts."""

_ENDS = 2**16
"""Bytes from each end of a file in memory that its identity depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamColumns:
    """Make of the rows of a source the columns that training draws; a batch function for `IterableDataset.map`.

    It runs the functions that check rows, batch by batch. Returns `media`, `caption`, the columns of conditions,
    [`MediaMetadata`] and [`BucketColumns`], and `hf_bucketing_row`: a number from 0 to 2**63 - 1 that follows from a
    row's file, captions and clip alone, so that its noise and crop depend neither on the shard, process and worker
    that read it, nor on the rows before it. Of a file in memory, its name without the folder of its tar, its length,
    and the first and last 64 KiB count. Rows that are cut into clips become one row each.

    Args:
        captions ([`CaptionTexts`]): Text columns, and how texts are made of them.
        sizes ([`MediaMetadata`] or [`ExistingMetadata`]): How sizes are read from headers, or taken from columns.
        clips ([`ClipRows`], *optional*): How rows are cut into clips.
        conditions ([`ConditionColumns`]): Media column, and the column of each condition, which becomes a column of
            its name; how they are checked.
        buckets ([`BucketColumns`]): Table and rule of the buckets.
        audio ([`AudioColumns`], *optional*): How it is known which files have sound, where it is trained.
        is_regularization (`bool`): Whether all rows are regularization samples, and not those alone that a column
            marks.
    """

    captions: CaptionTexts
    sizes: MediaMetadata | ExistingMetadata
    clips: ClipRows | None = None
    conditions: ConditionColumns
    buckets: BucketColumns
    audio: AudioColumns | None = None
    is_regularization: bool = False
    rule_version: int = field(default=3, init=False)

    @classmethod
    def of(
        cls, config: RowsConfig, buckets: BucketColumns, *, root: str | None, references: ReferenceRule
    ) -> StreamColumns:
        """Return the function for a source whose columns are all named, and whose sizes have one origin."""
        assert config.media_column is not None
        assert config.caption_column is not None
        column, texts = config.media_column, tuple(config.caption_column.split(","))
        on_error, on_caption_error = config.treatment
        sizes: MediaMetadata | ExistingMetadata
        sizes = MediaMetadata(column, target_fps=config.target_fps, root=root, on_error=on_error)
        if config.size_columns is not None:
            named = read_size_columns(config.size_columns)
            fps = config.target_fps if "fps" in named else None
            sizes = ExistingMetadata(**named, target_fps=fps, on_error=on_error, media_column=column)
        files = MediaColumns(column=column, root=root, conditions=config.conditions, references=references)
        clips = config.clip_rule(1)
        return cls(
            captions=CaptionTexts(
                texts,
                on_error=on_caption_error,
                template=config.caption_template,
                media_column=column,
                audio_column=config.audio_caption_column,
            ),
            sizes=sizes,
            clips=None
            if clips is None
            else ClipRows(clips, on_error=on_error, caption_column=texts[0], media_column=column),
            conditions=ConditionColumns(files, on_error=on_error),
            buckets=buckets,
            audio=AudioColumns(files, on_error=on_error) if config.with_audio else None,
            is_regularization=config.is_regularization,
        )

    def rejecting(self) -> StreamColumns:
        """Return the function that rejects rows whose files, clips or conditions are at fault, and raises no error."""
        clips = None if self.clips is None else replace(self.clips, on_error="reject")
        sizes, conditions = replace(self.sizes, on_error="reject"), replace(self.conditions, on_error="reject")
        audio = None if self.audio is None else replace(self.audio, on_error="reject")
        return replace(self, sizes=sizes, clips=clips, conditions=conditions, audio=audio)

    @property
    def identity(self) -> StreamColumns:
        """What tells streams apart: not what becomes of rows at fault, which a resumed run may change."""
        files = self.conditions.files
        rule: Any = references_before.ReferenceRule.of(files.references)
        known = replace(files, references=rule)
        audio = None if self.audio is None else replace(self.audio, files=known)
        return replace(self, conditions=replace(self.conditions, files=known), audio=audio).rejecting()

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that are read, those that not every row has included."""
        files, captions = self.conditions.files, self.captions
        of_audio = [] if captions.audio_column is None else [captions.audio_column]
        return (
            files.column,
            *all_columns(files.conditions),
            *captions.columns,
            *of_audio,
            *self.sizes.input_columns,
        )

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return the columns for a batch of rows.

        Raises:
            ColumnError: If a column is missing, or, under `on_error="raise"`, a caption is not text, a size is missing
                or a clip does not lie in its file.
            MediaError: If a file cannot be read or a condition does not fit, unless `on_error` is `"reject"`.
            RowsError: If several of these are so.
        """
        with Faults() as faults:
            return self._columns(batch, faults)

    def _columns(self, batch: Mapping[str, Sequence[Any]], faults: Faults) -> dict[str, Any]:
        files = self.conditions.files
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        named = (files.column, *all_columns(files.conditions))
        columns: dict[str, Any] = {name: [_named_files(row.get(name), row) for row in rows] for name in named}
        for name in (*self.input_columns, SCENE_START, SCENE_END):
            columns.setdefault(name, [row.get(name) for row in rows])
        read = self.sizes.sizes if isinstance(self.sizes, ExistingMetadata) else self.sizes
        if self.is_regularization or REGULARIZATION in batch:
            columns[REGULARIZATION] = [self.is_regularization or bool(row.get(REGULARIZATION)) for row in rows]
        columns |= read(columns, faults.report)
        columns |= self.captions(columns, lambda error: faults.report(for_source(error)))
        if self.clips is not None:
            columns = self.clips(columns, faults.report)
        columns |= self.conditions(columns, faults.report)
        if self.audio is not None:
            columns |= self.audio(columns)
        assigned: Any = self.buckets(columns)
        media, captions = columns[files.column], columns[self.captions.columns[0]]
        file_columns = {MEDIA: media}
        for name, column in files.conditions.items():
            file_columns[name] = _lists_of_files(files, columns) if name == REFERENCE else columns[column]
        others = ("num_frames_estimated", CLIP_START, CLIP_END, REGULARIZATION, REFERENCE_SIZES, HAS_AUDIO)
        kept = [name for name in (*SIZES, *others) if name in columns]
        times = zip(*(columns.get(name, [None] * len(media)) for name in (CLIP_START, CLIP_END)), strict=True)
        return {
            **file_columns,
            **{name: columns[name] for name in kept},
            CAPTION: captions,
            **{name: values.tolist() for name, values in assigned.items()},
            ROW: [*map(index_of, media, captions, times)],
        }


def _named_files(cell: Any, row: Mapping[str, Any]) -> Any:
    """Return a cell, or each file of a list of files, with a name for its bytes, see [`named_cell`]."""
    return [named_cell(file, row) for file in cell] if isinstance(cell, list) else named_cell(cell, row)


def _lists_of_files(files: MediaColumns, columns: Mapping[str, Sequence[Any]]) -> list[list[Any]]:
    """Return the references of each row of a batch, whatever columns they are in."""
    named = columns_of(REFERENCE, files.conditions[REFERENCE])
    cells = (dict(zip(named, values, strict=True)) for values in zip(*(columns[name] for name in named), strict=True))
    return [[file for _, file in files.cells(REFERENCE, row)] for row in cells]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOfSources:
    """Make the columns of one source those of a stream of several; a batch function after [`StreamColumns`].

    Args:
        number (`int`): Position of the source, which becomes the column `hf_bucketing_source`.
        name (`str`): Name of the source, which belongs to the identity of its rows; `""` for the first.
        root (`str`, *optional*): Folder or URL before its relative paths; None for the first source, whose paths stay.
        conditions (`tuple` of `str`): Conditions of all sources; those that this one lacks are missing in its rows.
        bucket_ids (`tuple` of `int`, *optional*): Ids that the buckets of its table have in that of all sources.
    """

    number: int
    name: str
    root: str | None
    conditions: tuple[str, ...]
    bucket_ids: tuple[int, ...] | None

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return the columns for a batch of rows."""
        count = len(batch[MEDIA])
        columns: dict[str, Any] = {SOURCE_COLUMN: [self.number] * count}
        for name in (MEDIA, *self.conditions):
            columns[name] = [self._full_paths(cell) for cell in batch.get(name, [None] * count)]
        if REFERENCE in self.conditions:
            columns[REFERENCE_SIZES] = batch.get(REFERENCE_SIZES, [[]] * count)
        if self.bucket_ids is not None:
            ids = (*self.bucket_ids, REJECTED_BUCKET)  # a rejected row's bucket, −1, is the last entry
            columns["bucket_id"] = [ids[bucket] for bucket in batch["bucket_id"]]
        if self.name:
            columns[ROW] = [_digest([self.name.encode(), str(index).encode()]) for index in batch[ROW]]
        return columns

    def _full_paths(self, cell: Any) -> Any:
        if isinstance(cell, list):
            return [self._full_paths(file) for file in cell]
        relative = isinstance(cell, str) and not is_url(cell) and not os.path.isabs(cell)
        return f"{self.root}/{cell}" if relative and self.root is not None else cell


def index_of(cell: Any, captions: str | Sequence[str], times: tuple[float | None, float | None]) -> int:
    """Return the identity of a row, from 0 to 2**63 - 1; `times` are the seconds of a clip, None for a whole file."""
    data = cell.get("bytes") if isinstance(cell, dict) else None
    texts = [captions] if isinstance(captions, str) else captions
    name = path_of(cell) or "a row without a path"
    parts = [name.encode(errors="surrogateescape"), *(text.encode(errors="surrogatepass") for text in texts)]
    if data is not None:
        parts += [str(len(data)).encode(), data[:_ENDS], data[-_ENDS:]]
    parts += [str(time).encode() for time in times if time is not None]
    return _digest(parts)


def _digest(parts: Sequence[bytes]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return int.from_bytes(digest.digest(), "big") >> 1
