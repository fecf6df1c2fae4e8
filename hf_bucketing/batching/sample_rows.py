"""The rows of a data set as a way of batching counts them: their sizes, tokens, and what they are shown."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from accelerate import PartialState
from datasets import Features

from ..buckets.arrays import BoolArray, IntArray
from ..buckets.assignment import REJECTED_BUCKET, Rejection
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..columns.apply import with_columns
from ..columns.arrays import column_array
from ..columns.faults import NAMED_ROWS, listed
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream
from ..conditions.condition import Condition, condition_named
from ..conditions.names import KEYFRAMES
from ..conditions.references import ReferenceRule, references_of
from ..conditions.rows import ConditionRules, RowConditions, tokens_with
from ..conditions.shares import appended_by
from ..errors import OversizeError
from ..loaders.random_resize import RandomResize
from ..models.recipe import Recipe
from ..packing.names import Grid
from ..packing.token_drop import TokenDrop
from ..plans.packs import PackPlanConfig, sample_spans
from ..randomness import ROW


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokens:
    """What a model adds to the tokens of a sample, and how much they cost.

    Args:
        width (`int`): Channels of a token, which decide the cost of attention relative to all else.
        text_tokens (`int`): Tokens that a caption adds to the sequence of its sample, as a
            [`Recipe`][hf_bucketing.models.recipe.Recipe] counts them; `max_tokens` holds them.
        conditions (`tuple` of [`Condition`][hf_bucketing.conditions.condition.Condition]): What the model is shown of
            a sample, where each enters it and what each adds to the text.
        refuse (callable, *optional*): Returns why the model cannot take a sample of a token grid, or None if it can.
    """

    width: int
    text_tokens: int = 0
    conditions: tuple[Condition, ...] = ()
    refuse: Callable[[Grid], str | None] | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> ModelTokens:
        """Return those of the model of a loaded recipe."""
        return cls(
            width=recipe.family.width(recipe.transformer),
            text_tokens=recipe.text_tokens(recipe.max_sequence_length),
            conditions=recipe.conditions,
            refuse=lambda grid: recipe.family.refusal(recipe.transformer, grid),
        )

    @property
    def references(self) -> ReferenceRule:
        """Condition of references: where they enter the model, and what each adds to the text of its sample."""
        return references_of(self.conditions)

    def rules_of(self, prepared: PreparedDataset | PreparedStream, *, condition: str | None = None) -> ConditionRules:
        """Return how the conditions of a data set are counted in a run with a `condition`.

        It does not matter for which model the data set was prepared. A reference in front of a sample has the sample's
        size. Frames that a run appends are counted as if each sample had the most of them.
        """
        return ConditionRules.of(
            prepared.conditions,
            references=prepared.references.entering(self.references),
            audio=prepared.audio,
            appended=appended_by(condition, condition_named(self.conditions, KEYFRAMES)),
            taken=self.conditions,
        )


logger = logging.getLogger(__name__)


def beyond_positions(bucket_ids: IntArray, table: OpenTable, refuse: Callable[[Grid], str | None]) -> BoolArray:
    """Return which rows have a token grid that the model cannot take, `(n,)`; `refuse` says why for one grid."""
    ids, of_row = np.unique(bucket_ids, return_inverse=True)
    refused = [
        bucket_id > REJECTED_BUCKET and refuse(_grid(table, bucket_id)) is not None for bucket_id in ids.tolist()
    ]
    return np.array(refused, np.bool_)[of_row.ravel()]


def _grid(table: OpenTable, bucket_id: int) -> Grid:
    return table.spec.grid(table.size(bucket_id))


def exceeding(num_tokens: IntArray, packs: PackPlanConfig, *, text_tokens: int) -> BoolArray:
    """Return which rows have more tokens than a pack holds, `(n,)`."""
    return sample_spans(num_tokens, dataclasses.replace(packs, oversize="own_batch"), text_tokens=text_tokens)[1]


def without_rows(prepared: PreparedDataset, rows: BoolArray, *, batch: str, why: str) -> PreparedDataset:
    """Reject rows of a data set as too large for a `batch`, and log from the main process how many, which and why."""
    dataset, label = prepared.dataset, Rejection.TOO_LARGE.label
    numbers = np.flatnonzero(rows)
    names = listed(prepared.file_names(numbers[:NAMED_ROWS].tolist()), total=len(numbers), separator=", ")
    kind = f"row fits no {batch} and is" if len(numbers) == 1 else f"rows fit no {batch} and are"
    if not PartialState._shared_state or PartialState().is_main_process:
        logger.warning(f"{len(numbers):,} {kind} rejected as {label}: {names}. {why}")
    columns = {
        "bucket_id": np.where(rows, np.int32(REJECTED_BUCKET), column_array(dataset, "bucket_id")),
        "num_tokens": np.where(rows, 0, column_array(dataset, "num_tokens")),
        "rejection": np.where(rows, label, column_array(dataset, "rejection").astype(object)),
    }
    features = Features({name: dataset.features[name] for name in columns})
    return dataclasses.replace(prepared, dataset=with_columns(dataset, columns, features=features))


def with_file(error: OversizeError, prepared: PreparedDataset, *, advice: Sequence[str]) -> OversizeError:
    """Return an error about a row with its file in place of its number, and other advice after the first."""
    assert error.row is not None, "plans name it"
    (name,) = prepared.file_names([error.row])
    return OversizeError(error.fact.replace(f"Row {error.row} ", f"{name} ", 1), advice=[error.advice[0], *advice])


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


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """The rows of a data set as a way of batching counts them.

    Args:
        prepared ([`PreparedDataset`][hf_bucketing.columns.PreparedDataset]): The rows, with the sizes of `table`.
        table ([`BucketTable`] or [`OpenTable`]): Table of the sizes.
        counting ([`ModelTokens`]): What the model adds to the tokens of a sample.
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row in `table`.
        sample_tokens (array of `int`, shape `(n,)`): Tokens of each row's own grid, without those that are dropped.
        num_tokens (array of `int`, shape `(n,)`): The same with those of its conditions.
        conditions ([`RowConditions`]): Conditions of the rows.
        resize ([`RandomResize`][hf_bucketing.loaders.RandomResize], *optional*): What draws other sizes per epoch.
        views (callable, *optional*): Returns the cached view of each row in an epoch, for the sizes of `resize`.
        oversize (array of `bool`, shape `(n,)`): Rows that were rejected because no batch holds them.
    """

    prepared: PreparedDataset
    table: Table
    counting: ModelTokens
    bucket_ids: IntArray
    sample_tokens: IntArray
    num_tokens: IntArray
    conditions: RowConditions
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
        rules: ConditionRules,
        drop: TokenDrop | None,
        resize: RandomResize | None,
        views: Callable[..., IntArray] | None,
    ) -> SampleRows:
        """Count the rows of a data set whose sizes are those of a table; `rules` are those of their conditions."""
        spec, conditions = prepared.spec, prepared.row_conditions(rules)
        names = ("bucket_id", "num_tokens")
        bucket_ids, num_tokens = (column_array(prepared.dataset, name).astype(np.int64) for name in names)
        sample_tokens = counted_tokens(bucket_ids, num_tokens, table=table, spec=spec, drop=drop)
        return cls(
            prepared=prepared,
            table=table,
            counting=counting,
            bucket_ids=bucket_ids,
            sample_tokens=sample_tokens,
            num_tokens=tokens_with(conditions, sample_tokens, bucket_ids, table=table, spec=spec),
            conditions=conditions,
            resize=resize,
            views=views,
            oversize=np.zeros(len(sample_tokens), np.bool_),
        )

    def without(self, rows: BoolArray, *, batch: str, why: str) -> SampleRows:
        """Reject rows `(n,)` that no `batch` holds, in words, and log how many, which and why."""
        return replace(
            self,
            prepared=without_rows(self.prepared, rows, batch=batch, why=why),
            bucket_ids=np.where(rows, REJECTED_BUCKET, self.bucket_ids),
            sample_tokens=np.where(rows, 0, self.sample_tokens),
            num_tokens=np.where(rows, 0, self.num_tokens),
            oversize=self.oversize | rows,
        )

    @property
    def tokens_to_plan(self) -> IntArray | Callable[[int], IntArray]:
        """Tokens of each row, `(n,)`, or where sizes are drawn a function from the epoch to them."""
        if self.resize is None:
            return self.num_tokens
        columns = self._size_columns()
        return self.resize.token_counter(**columns, conditions=self.conditions, views=self.views)

    @property
    def learned_tokens(self) -> IntArray | Callable[[int], IntArray]:
        """Tokens of each row that enter the loss, those of its own grid; likewise."""
        if self.resize is None:
            return self.sample_tokens
        return self.resize.token_counter(**self._size_columns(), views=self.views)

    def _size_columns(self) -> dict[str, Any]:
        """Return the numbers of the rows, and the sides of their files, −1 for rows that no batch holds."""
        dataset = self.prepared.dataset
        sides = ("num_frames", "height", "width")
        columns = {name: np.where(self.oversize, -1, column_array(dataset, name)) for name in sides}
        columns["num_frames"] = self.prepared.open_table.cut(columns["num_frames"])
        return {**columns, "index": column_array(dataset, ROW)}
