"""Collators: decode the rows of a batch, each at its target size, in a DataLoader worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..buckets.assignment import Rejection
from ..buckets.open_table import OpenTable, open_table
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..conditions.audio import AudioRule
from ..conditions.references import ReferenceRule
from ..errors import BucketingError, ColumnError, MediaError, explains_arguments
from ..media.rows import REGULARIZATION, SOURCE, SOURCE_COLUMN, MediaColumns, check_flips
from ..media.sample import LoadedSample, load
from ..media.views import View, ViewRule, seeded_draws
from ..randomness import ADD_ROWS, COLUMN_PREFIX, ROW
from .captions import CaptionRule
from .faults import Replacements
from .occurrences import OCCURRENCE, occurrence_of
from .random_resize import RandomResize
from .state import epoch_number

BUCKET_PART = f"{COLUMN_PREFIX}bucket_part"
"""Column of the part of its bucket that a row belongs to, where references or audio divide buckets."""

PLANNED = "planned_index"
"""List of a batch whose unreadable samples are replaced: the `index` of each row that the sampler drew."""

Row = Mapping[str, Any]
Loaded = tuple[LoadedSample, View]

_explained = explains_arguments(
    random_crop="views=ViewRule(random_crop=…)",
    frame_picking="views=ViewRule(frame_picking=…)",
    flip_probability="views=ViewRule(flip_probability=…)",
    flip_references="views=ViewRule(flip_references=…)",
    video_decoder="views=ViewRule(video_decoder=…)",
    on_error="replacements=Replacements(dataset, log=…)",
)


@dataclass(kw_only=True, eq=False, repr=False)
class MediaCollator:
    """Decode the rows of a batch, each at the size that [`target`][MediaCollator.target] returns.

    The base class of [`BucketCollator`] and [`PackCollator`]. Crops, first frames and flips are random, and so is the
    choice of one of several captions. With a `seed`, they are a function of the seed, the epoch (see
    [`set_epoch`][MediaCollator.set_epoch]), the row's `index` column and its occurrence (see
    [`NumberedRows`][hf_bucketing.loaders.NumberedRows]) alone, so a resumed run repeats them on any number of workers
    and processes. Without a seed they follow torch's random state in the worker.

    Args:
        column (`str`): Media column: paths, bytes, or dictionaries of both (`Image(decode=False)`).
        caption_column (`str`, *optional*): Column of a text or a list of texts; None if there is none.
        captions ([`CaptionRule`]): Order of tags in captions.
        root (`str`, *optional*): Folder or URL that relative paths start from.
        other_roots (`tuple` of `str`): Folders and URLs of the other sources of a data set that has several.
        conditions (mapping of `str` to `str`): Column of each condition that is loaded with a sample, such as
            `{"control": "control_path"}`. The batch then has `shown`, a list with one tensor per sample by name, or
            with a tuple of tensors for references, see [`LoadedSample`][hf_bucketing.media.sample.LoadedSample].
        references ([`ReferenceRule`][hf_bucketing.conditions.references.ReferenceRule]): Sizes in which references are
            shown.
        audio ([`AudioRule`][hf_bucketing.conditions.audio.AudioRule], *optional*): Rule of the audio that is loaded
            with each sample, as `audio` in `shown`; by default none is.
        sources (`tuple` of `str`): Names of the sources of a data set that has several. The batch then has the list
            `source`, of the name of each sample's.
        views ([`ViewRule`][hf_bucketing.ViewRule]): Frames, crop, flip and decoder of each sample.
        seed (`int`, *optional*): Seed of the views and of the choice of replacements.
        replacements ([`Replacements`], *optional*): Samples that replace unreadable ones: others of the same bucket,
            or in a pack of as many tokens (fewer if there are none). The batch then holds the replacement's index and
            caption, and the list `planned_index` of the rows that were drawn. By default, an unreadable sample ends
            the run.
    """

    column: str = "video"
    caption_column: str | None = "caption"
    captions: CaptionRule = field(default_factory=CaptionRule)
    root: str | None = None
    other_roots: tuple[str, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)
    references: ReferenceRule = field(default_factory=ReferenceRule)
    audio: AudioRule | None = None
    sources: tuple[str, ...] = ()
    views: ViewRule = ViewRule()
    seed: int | None = None
    replacements: Replacements | None = None

    def __post_init__(self) -> None:
        self._columns = MediaColumns(
            column=self.column,
            root=self.root,
            other_roots=self.other_roots,
            conditions=self.conditions,
            references=self.references,
            audio=self.audio,
        )
        check_flips(self.views, self.conditions, self.references)
        # Shared memory, so that persistent workers see the epoch change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose views are drawn with a `seed`; a sampler in a prepared loader does it by itself."""
        self._epoch.fill_(epoch_number(epoch))

    def target(self, rows: Sequence[Row]) -> list[Size]:
        """Return the target size of each row."""
        raise NotImplementedError

    def load(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return `pixel_values` as a list of `(3, F, H, W)`, and `size`, `crop`, `flip`, `fps`, `caption` and `index`.

        With conditions or audio, also return `shown`.

        Raises:
            ColumnError: If a needed column is missing.
            MediaError: If a file cannot be decoded; the message names the row.
        """
        require(rows[0], [self.column, "num_frames", "fps", *self._columns.shown_columns])
        if self.caption_column is not None:
            require(rows[0], [self.caption_column], hint="Name its captions as `caption_column`, or give None.")
        placed = [self._load_or_replace(row, size) for row, size in zip(rows, self.target(rows), strict=True)]
        loaded = [sample for *_, sample in placed]
        batch: dict[str, Any] = {
            "pixel_values": [sample.pixels for sample, _ in loaded],
            "size": [size for _, size, _ in placed],
            "crop": [sample.crop for sample, _ in loaded],
            "flip": [view.flip for _, view in loaded],
            "fps": [view.fps for _, view in loaded],
        }
        if conditions := self._columns.shown:
            batch["shown"] = {name: [sample.conditions[name] for sample, _ in loaded] for name in conditions}
        if self.caption_column is not None:
            draw = partial(self.captions.caption, column=self.caption_column, seed=self.seed, epoch=int(self._epoch))
            batch["caption"] = [draw(row) for row, *_ in placed]
        if ROW in placed[0][0]:
            batch["index"] = [int(row[ROW]) for row, *_ in placed]
        batch |= regularization([row for row, *_ in placed])
        batch |= names_of_sources([row for row, *_ in placed], self.sources)
        if self.replacements is not None:
            batch[PLANNED] = [int(row[ROW]) for row in rows]
        if OCCURRENCE in rows[0]:
            batch[OCCURRENCE] = [occurrence_of(row) for row in rows]
        return batch

    def candidates(self, row: Row, replacements: Replacements) -> npt.NDArray[np.int64]:
        """Return the positions of the rows that may replace an unreadable one."""
        raise NotImplementedError

    def replacement_size(self, row: Row, size: Size) -> Size:
        """Return the target size of a row that replaces one of target `size`."""
        return size

    def _load_or_replace(self, row: Row, size: Size) -> tuple[Row, Size, Loaded]:
        """Load a row, or the first readable one of its replacements."""
        if self.replacements is None:
            return row, size, self._load(row, size)
        require(row, [ROW])
        epoch, index = int(self._epoch), int(row[ROW])
        others: list[int] | None = None
        while True:
            try:
                loaded = self._load(row, size)
            except MediaError as error:
                if others is None:
                    candidates = self.candidates(row, self.replacements)
                    others = self.replacements.choose(candidates, index=index, seed=self.seed or 0, epoch=epoch)
                if not others:
                    raise MediaError(f"{error} No readable sample was found to replace row {index}.") from error
                failed = int(row[ROW])
                row = {**self.replacements.dataset[others.pop(0)], OCCURRENCE: occurrence_of(row)}
                size = self.replacement_size(row, size)
                self.replacements.report(epoch=epoch, index=failed, reason=str(error), replacement=int(row[ROW]))
            else:
                self.replacements.consecutive = 0
                return row, size, loaded

    def _load(self, row: Row, size: Size) -> Loaded:
        name = f"row {row[ROW]}" if ROW in row else f"a row without a column {ROW}"
        draws = self._draws(row)
        try:
            sample = self._columns.sample(row, size, views=self.views, draws=draws, name=name)
            return load(sample), sample.view
        except MediaError as error:
            raise MediaError(f"Cannot load {name}: {error}") from error

    def _draws(self, row: Row) -> npt.NDArray[np.float64]:
        """Return the uniform numbers in [0, 1) that choose the row's view."""
        count = self.views.num_draws
        if not count:
            return np.zeros(0)
        if self.seed is None:
            return torch.rand(count, dtype=torch.float64).numpy()
        require(row, [ROW])
        index, occurrence = int(row[ROW]), occurrence_of(row)
        return seeded_draws(count, seed=self.seed, epoch=int(self._epoch), index=index, occurrence=occurrence)


@_explained
@dataclass(eq=False, repr=False)
class BucketCollator(MediaCollator):
    """Make a batch of one bucket: cover-resize and crop every sample to the bucket's size, and stack them.

    Rows of several buckets, a catch-all batch, get the size of the table's base bucket. They are refused where the
    sampler plans no such batches, which a prepared loader or [`check_loader`] says to the collator.

    Called with rows of a data set that has `bucket_id`, `num_frames` and `fps` columns, returns a `dict` with
    `pixel_values` (`float32`, `(B, 3, F, H, W)`, in [−1, 1]), `bucket_id`, and the lists `caption`, `size`, `crop`,
    `flip`, `fps` (0 for images) and `index`.

    Args:
        table ([`BucketTable`] or [`OpenTable`]): Table of the `bucket_id` column.
        **media: The arguments of [`MediaCollator`], by name.
    """

    table: BucketTable | OpenTable

    def __post_init__(self) -> None:
        super().__post_init__()
        # Shared memory, as the epoch: 0 while no sampler was asked, 1 if all keep buckets apart, 2 if one mixes them.
        self._mixed = torch.zeros((), dtype=torch.int64).share_memory_()

    def allow_mixed(self, allowed: bool) -> None:
        """Choose whether batches may mix buckets; what one of several samplers of this collator allows stays allowed.

        A sampler in a prepared loader does it by itself.
        """
        self._mixed.fill_(max(int(self._mixed), 2 if allowed else 1))

    def target(self, rows: Sequence[Row]) -> list[Size]:
        """Return the size of the rows' bucket for each row.

        Raises:
            ColumnError: If there is no `bucket_id` column.
            BucketingError: If the rows have no bucket, or several buckets and the table has no base bucket or the
                sampler plans no such batch.
        """
        return [self.table.size(self._bucket(rows))] * len(rows)

    def _bucket(self, rows: Sequence[Row]) -> int:
        """Return the bucket of all rows, or the base bucket of the table for a catch-all batch."""
        require(rows[0], ["bucket_id"])
        ids = {int(row["bucket_id"]) for row in rows}
        if len(ids) == 1:
            return ids.pop()
        if self.table.base is None or int(self._mixed) == 1:
            raise BucketingError(
                f"A batch holds rows of the buckets {sorted(ids)}, but the sampler planned one bucket. Make the "
                "BucketBatchSampler from these rows in their present order, after shuffle and sort; batches that mix "
                'buckets need `remainder="catch_all"` and a table with a base bucket.'
            )
        return self.table.base

    def candidates(self, row: Row, replacements: Replacements) -> npt.NDArray[np.int64]:
        """Return the rows of the same bucket, or of the same part of it."""
        name = BUCKET_PART if BUCKET_PART in row else "bucket_id"
        return np.flatnonzero(replacements.column(name) == int(row[name]))

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the batch; errors as in `load` and `target`."""
        batch = self.load(rows)
        return {**batch, "pixel_values": torch.stack(batch["pixel_values"]), "bucket_id": self._bucket(rows)}


@_explained
@dataclass(eq=False, repr=False)
class PackCollator(MediaCollator):
    """Make a list of samples, each at its own size, rounded up to whole tokens (frames: down to a valid number).

    Called with rows of a data set that has `width`, `height`, `num_frames` and `fps` columns, returns a `dict` with
    `pixel_values` (a list of `float32` tensors `(3, F, H, W)`, in [−1, 1]), `caption`, `size`, `crop`, `flip`,
    `fps` (0 for images) and `index`.

    Args:
        table ([`OpenTable`][hf_bucketing.OpenTable] or [`LatentSpec`]): Table that counted `num_tokens`; a spec means
            `open_table(spec)`.
        resize ([`RandomResize`], *optional*): Rule that draws each sample's own size anew in every epoch; the sampler
            must count the tokens of the same sizes (`resize.token_counter`).
        **media: The arguments of [`MediaCollator`], by name.

    Raises:
        BucketingError: If `resize` has another spec, or is combined with image sizes taken from videos or with
            `replacements`, whose tokens it would change.
    """

    table: OpenTable | LatentSpec
    resize: RandomResize | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._table = open_table(self.table) if isinstance(self.table, LatentSpec) else self.table
        resize, spec = self.resize, self._table.spec
        if resize is not None and resize.spec != spec:
            raise BucketingError(f"resize rounds to {resize.spec}, but the collator to {spec}; give both the same.")
        if resize is not None and self.replacements is not None:
            raise BucketingError('`on_error="replace"` needs sizes that stay; leave out `resize`.')
        if resize is not None and self._table.image_sizes is not None:
            raise BucketingError(
                "Images cannot take both sizes of videos and sizes drawn at random: leave out `resize`, or the "
                "table's image_sizes (--image_sizes own in hf_bucketing prepare)."
            )

    def target(self, rows: Sequence[Row]) -> list[Size]:
        """Return each row's own size in whole tokens, or the size of videos that it takes as an image.

        Raises:
            ColumnError: If a size column is missing.
            BucketingError: If a row has no frames or pixels, or is an image that fits no size of a video.
        """
        require(rows[0], ["num_frames", "height", "width"])
        sizes = [Size(*(int(row[key]) for key in ("num_frames", "height", "width"))) for row in rows]
        sizes = [size._replace(frames=int(self._table.cut(size.frames))) for size in sizes]
        if self.resize is not None:
            require(rows[0], [ROW])
            indices = [int(row[ROW]) for row in rows]
            return self.resize.sizes(sizes, indices=indices, epoch=int(self._epoch))
        assigned = self._table.assign(*zip(*sizes, strict=True))
        for size, reason in zip(sizes, assigned.rejection.tolist(), strict=True):
            if reason != Rejection.NONE:
                raise BucketingError(
                    f"A row of {size} is rejected as {Rejection(reason).label}; leave out rows whose num_tokens is 0."
                )
        return [self._table.size(int(bucket)) for bucket in assigned.bucket_id]

    def candidates(self, row: Row, replacements: Replacements) -> npt.NDArray[np.int64]:
        """Return the rows of as many tokens, or those of fewer if there is no other."""
        tokens, row_tokens = replacements.column("num_tokens"), int(row["num_tokens"])
        alike = np.flatnonzero(tokens == row_tokens)
        return alike if len(alike) > 1 else np.flatnonzero((tokens > 0) & (tokens < row_tokens))

    def replacement_size(self, row: Row, size: Size) -> Size:
        """Return the row's own size."""
        return self.target([row])[0]

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the batch; errors as in `load` and `target`."""
        return self.load(rows)


def regularization(rows: Sequence[Row]) -> dict[str, list[bool]]:
    """Return the list `is_regularization` of a batch, which says what rows are marked, if any is."""
    marks = [bool(row.get(REGULARIZATION)) for row in rows]  # None in rows of sources without marks
    return {REGULARIZATION: marks} if any(marks) else {}


def names_of_sources(rows: Sequence[Row], sources: Sequence[str]) -> dict[str, list[str]]:
    """Return the list `source` of a batch, which names the source of each row, if there are several."""
    return {SOURCE: [sources[row[SOURCE_COLUMN]] for row in rows]} if sources else {}


def require(row: Row, columns: Sequence[str], *, hint: str | None = None) -> None:
    """Raise if a row lacks a column; the message says how to add it, unless there is another hint.

    Raises:
        ColumnError: If a column is missing.
    """
    missing = [column for column in columns if column not in row]
    if missing:
        add = ADD_ROWS if ROW in missing else "MediaMetadata and BucketColumns compute columns of sizes and buckets"
        raise ColumnError(f"A row lacks {missing}; it has {sorted(row)}: {hint or add}.")
