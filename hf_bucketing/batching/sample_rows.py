"""The rows of a data set as a way of batching counts them: their sizes, their tokens, and what they are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from ..buckets.arrays import BoolArray, IntArray
from ..buckets.assignment import REJECTED_BUCKET
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..columns.arrays import column_array
from ..columns.prepared import PreparedDataset
from ..loaders.random_resize import RandomResize
from ..media.references import ReferenceRule
from ..media.row_audio import RowAudio
from ..media.row_references import RowReferences, sample_sizes
from ..packing.token_drop import TokenDrop
from ..randomness import ROW
from .counting import ModelTokens
from .oversize import without_rows

Table: TypeAlias = BucketTable | OpenTable


def counted_tokens(
    bucket_ids: IntArray, num_tokens: IntArray, *, table: Table, spec: LatentSpec, drop: TokenDrop | None
) -> IntArray:
    """Return the tokens of each row's own grid to plan with, `(n,)`: those that token drop keeps.

    A fixed rate keeps as many whatever the seed. Rows of 0 `num_tokens` keep 0.
    """
    if drop is None:
        return num_tokens
    usable = num_tokens > 0
    ids, buckets = np.unique(bucket_ids[usable], return_inverse=True)
    kept = num_tokens.copy()
    grids = [spec.grid(table.size(bucket_id)) for bucket_id in ids.tolist()]
    kept[usable] = np.array(drop.num_kept(grids, seeds=[0] * len(grids)), np.int64)[buckets]
    return kept


def with_shown(
    own: IntArray,
    bucket_ids: IntArray,
    *,
    table: Table,
    spec: LatentSpec,
    references: RowReferences | None,
    audio: RowAudio | None,
) -> IntArray:
    """Return the tokens of each row, `(n,)`: its own, those of its references, and those of its audio."""
    if references is not None:
        own = own + references.num_tokens(sample_sizes(bucket_ids, table), spec=spec)
    if audio is not None:
        own = own + audio.num_tokens(sample_sizes(bucket_ids, table)[:, 0])
    return own


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """The rows of a data set as a way of batching counts them.

    Args:
        prepared ([`PreparedDataset`][hf_bucketing.columns.PreparedDataset]): The rows, with the sizes of `table`.
        table ([`BucketTable`] or [`OpenTable`]): Table of the sizes.
        counting ([`ModelTokens`]): What the model adds to the tokens of a sample.
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row in `table`.
        own_tokens (array of `int`, shape `(n,)`): Tokens of each row's own grid, without those that are dropped.
        num_tokens (array of `int`, shape `(n,)`): The same with those of its references and of its audio.
        references ([`RowReferences`], *optional*): References of the rows, where samples have some.
        audio ([`RowAudio`], *optional*): Audio of the rows, where some is trained.
        resize ([`RandomResize`][hf_bucketing.RandomResize], *optional*): What draws other sizes in every epoch.
        views (callable, *optional*): Returns the cached view of each row in an epoch, for the sizes of `resize`.
        oversize (array of `bool`, shape `(n,)`): Rows that were rejected because no batch holds them.
    """

    prepared: PreparedDataset
    table: Table
    counting: ModelTokens
    bucket_ids: IntArray
    own_tokens: IntArray
    num_tokens: IntArray
    references: RowReferences | None
    audio: RowAudio | None
    resize: RandomResize | None
    views: Callable[..., IntArray] | None
    oversize: BoolArray

    @classmethod
    def of(
        cls,
        prepared: PreparedDataset,
        table: Table,
        *,
        counting: ModelTokens,
        rule: ReferenceRule | None,
        drop: TokenDrop | None,
        resize: RandomResize | None,
        views: Callable[..., IntArray] | None,
    ) -> SampleRows:
        """Count the rows of a data set whose sizes are those of a table; `rule` is that of their references."""
        spec, audio = prepared.spec, prepared.row_audio
        references = None if rule is None else prepared.row_references(rule)
        names = ("bucket_id", "num_tokens")
        bucket_ids, num_tokens = (column_array(prepared.dataset, name).astype(np.int64) for name in names)
        own = counted_tokens(bucket_ids, num_tokens, table=table, spec=spec, drop=drop)
        return cls(
            prepared=prepared,
            table=table,
            counting=counting,
            bucket_ids=bucket_ids,
            own_tokens=own,
            num_tokens=with_shown(own, bucket_ids, table=table, spec=spec, references=references, audio=audio),
            references=references,
            audio=audio,
            resize=resize,
            views=views,
            oversize=np.zeros(len(own), np.bool_),
        )

    def without(self, rows: BoolArray, *, batch: str, why: str) -> SampleRows:
        """Reject rows `(n,)` that no `batch` holds, in words, and log how many, which and why."""
        return replace(
            self,
            prepared=without_rows(self.prepared, rows, batch=batch, why=why),
            bucket_ids=np.where(rows, REJECTED_BUCKET, self.bucket_ids),
            own_tokens=np.where(rows, 0, self.own_tokens),
            num_tokens=np.where(rows, 0, self.num_tokens),
            oversize=self.oversize | rows,
        )

    @property
    def tokens_to_plan(self) -> IntArray | Callable[[int], IntArray]:
        """Tokens of each row, `(n,)`, or where sizes are drawn a function from the epoch to them."""
        if self.resize is None:
            return self.num_tokens
        columns = self._size_columns()
        return self.resize.token_counter(**columns, references=self.references, audio=self.audio, views=self.views)

    @property
    def learned_tokens(self) -> IntArray | Callable[[int], IntArray]:
        """Tokens of each row that enter the loss, those of its own grid; likewise."""
        if self.resize is None:
            return self.own_tokens
        return self.resize.token_counter(**self._size_columns(), views=self.views)

    def _size_columns(self) -> dict[str, Any]:
        """Return the numbers of the rows, and the sides of their files, −1 for rows that no batch holds."""
        dataset = self.prepared.dataset
        sides = ("num_frames", "height", "width")
        columns = {name: np.where(self.oversize, -1, column_array(dataset, name)) for name in sides}
        columns["num_frames"] = self.prepared.open_table.cut(columns["num_frames"])
        return {**columns, "index": column_array(dataset, ROW)}
