"""The bucket batch sampler: batches of one size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets.arrow_dataset import Column

from ..buckets.arrays import BoolArray, FloatArray, IntArray
from ..buckets.assignment import REJECTED_BUCKET, has_bucket
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..conditions.rows import BucketParts, RowConditions, bucket_parts
from ..errors import PlanError, explains_arguments
from ..plans.buckets import BucketPlanConfig, plan_buckets, row_weights
from ..plans.deal import Remainder
from ..plans.epoch import EpochPlan
from ..plans.rows import column_of
from ..settings import check_at_least, chosen_config, plain_number
from .occurrences import NumberedRows
from .planned import PlannedBatchSampler
from .row_column import RowColumn, column_name, warn_of_rejected


@explains_arguments(PlanError)
class BucketBatchSampler(PlannedBatchSampler):
    """Draw batches of one bucket, by default in lockstep: all processes take the same bucket in the same step.

    The keywords from `batch_size` to `evaluation` are the most used settings of the plan, which
    [`BucketPlanConfig`][hf_bucketing.plans.BucketPlanConfig] describes; `config` holds all settings in one value
    instead. `weights`, `longest_first`, `num_processes` and `process_index` are those of [`PlannedBatchSampler`].

    Args:
        bucket_ids (array of `int`, shape `(n,)`): The data set's `bucket_id` column; rejected rows are never drawn.
        table ([`BucketTable`] or [`OpenTable`]): The table that the ids belong to. A column that `map_columns` made
            says which table it is, also after `select`, `map`, `filter`, `concatenate_datasets` and saving, and
            another is refused. A list or array does not say it: ids that this table lacks are refused, and when an
            accelerate loader draws, so are another table of its data set's `bucket_id` column or of its collator, and
            rows whose `bucket_id` differs, as after `shuffle`. Plain ids of another table of as many buckets, without
            such a column, cannot be told apart.
        config ([`BucketPlanConfig`][hf_bucketing.plans.BucketPlanConfig], *optional*): All settings of the plan; the
            `base` of catch-all batches is the table's.
        spec ([`LatentSpec`], *optional*): Strides and patch, to count tokens for `max_tokens`, `max_cost` and
            `longest_first`; an open table has its own.
        text_tokens (`int`): Tokens of each sample's padded text, for models with joint attention; they count like the
            sample's own.
        rejection (array, shape `(n,)`, *optional*): The data set's `rejection` column, for the warning that counts
            rejected rows by reason; not needed if `bucket_ids` is a column of that data set.
        conditions ([`RowConditions`][hf_bucketing.conditions.rows.RowConditions], *optional*): Conditions of the rows,
            such as references and audio, whose tokens count like the sample's own. A batch then holds rows of one
            bucket whose references have equal sizes too, and whose audio is equally long, or that have none. Needs
            `spec`.

    Raises:
        PlanError: On settings that `BucketPlanConfig` refuses, a setting beside `config`, if the ids are another
            table's, one is not in the table, a sample exceeds a limit, `weights` names a bucket that the table lacks,
            or `remainder="catch_all"` has no base bucket, one of too many frames, or conditions.
    """

    config: BucketPlanConfig

    def __init__(
        self,
        bucket_ids: npt.ArrayLike,
        *,
        table: BucketTable | OpenTable,
        batch_size: int | Mapping[int, int] | None = None,
        max_tokens: int | None = None,
        remainder: Remainder | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        evaluation: bool | None = None,
        config: BucketPlanConfig | None = None,
        spec: LatentSpec | None = None,
        text_tokens: int = 0,
        weights: npt.ArrayLike | Mapping[int, float] | None = None,
        longest_first: bool = False,
        rejection: npt.ArrayLike | None = None,
        conditions: RowConditions | None = None,
        num_processes: int | None = None,
        process_index: int | None = None,
    ) -> None:
        self.bucket_ids = _ids_in(table, bucket_ids)
        self.table = table
        self.text_tokens = plain_number(text_tokens, "text_tokens", integer=True, error=PlanError)
        check_at_least(0, self, "text_tokens", error=PlanError)
        self.spec = table.spec if spec is None and isinstance(table, OpenTable) else spec
        self.parts = self._divided(conditions) if conditions else None
        config = chosen_config(
            BucketPlanConfig,
            config,
            error=PlanError,
            batch_size=batch_size,
            max_tokens=max_tokens,
            remainder=remainder,
            shuffle=shuffle,
            seed=seed,
            evaluation=evaluation,
        )
        super().__init__(
            self._solved(self._with_base(config)),
            num_rows=len(self.bucket_ids),
            weights=weights,
            longest_first=longest_first,
            num_processes=num_processes,
            process_index=process_index,
        )
        if self.longest_first and self.spec is None:
            raise PlanError("`longest_first` counts tokens: pass spec=LatentSpec(…).")
        if isinstance(self.weights, Mapping):
            self.weights = self._weights_of_buckets(self.weights)
        self._column = RowColumn(name=column_name(bucket_ids) or "bucket_id", values=self.bucket_ids, must_equal=True)
        usable = has_bucket(self.bucket_ids)
        warn_of_rejected(bucket_ids, usable, rejection=rejection, process_index=self.process_index)

    def _with_base(self, config: BucketPlanConfig) -> BucketPlanConfig:
        """Return the settings with the base bucket of the table, if they stack what is left of all buckets in it."""
        if config.base is None and config.remainder != "catch_all":
            return config
        if self.parts is not None:
            raise PlanError(
                '`remainder="catch_all"` stacks what is left of all buckets, but audio and references of several '
                'sizes cannot be stacked; give `remainder="short"`.'
            )
        if config.base not in (None, self._base()):
            raise PlanError(f"`config` has base={config.base}, but the base bucket of the table is {self.table.base}.")
        return replace(config, base=self._base())

    def _weights_of_buckets(self, weights: Mapping[int, float]) -> Mapping[int, float] | FloatArray:
        """Return weights of buckets as they are, or those of rows where buckets are divided."""
        unknown = [bucket for bucket in weights if not 0 <= bucket < _end(self.table)]
        if unknown:
            raise PlanError(f"`weights` names the buckets {unknown}, but the table has 0 to {_end(self.table) - 1}.")
        return weights if self.parts is None else row_weights(self.bucket_ids.astype(np.int64), weights)

    def _solved(self, config: BucketPlanConfig) -> BucketPlanConfig:
        """Return the settings with the batch size of each bucket that occurs in place of the limits."""
        if not config.limited and (self.parts is None or isinstance(config.batch_size, int)):
            return config
        present = self._present if config.base is None else np.union1d(self._present, [config.base])
        buckets, more_tokens = self._of_parts(present)
        sizes = config.solved_sizes(
            buckets, table=self.table, spec=self.spec, text_tokens=more_tokens + self.text_tokens
        )
        by_bucket = dict(zip(present.tolist(), sizes.tolist(), strict=True)) or {0: 1}
        return replace(config, batch_size=by_bucket, max_tokens=None, max_cost=None, max_samples=None)

    def _divided(self, conditions: RowConditions) -> BucketParts:
        """Return the buckets divided by the sizes of conditions."""
        if self.spec is None:
            raise PlanError("`conditions` count tokens: pass spec=LatentSpec(…).")
        if conditions.num_rows != len(self.bucket_ids):
            raise PlanError(
                f"`conditions` are those of {conditions.num_rows} rows, but there are {len(self.bucket_ids)} "
                "`bucket_ids`; give both for the same rows."
            )
        return bucket_parts(self.bucket_ids, conditions, table=self.table, spec=self.spec)

    @property
    def _planned_ids(self) -> IntArray:
        """What a batch has in common, `(n,)`: the bucket of each row, or the part of it."""
        return self.bucket_ids.astype(np.int64) if self.parts is None else self.parts.ids

    @property
    def _present(self) -> IntArray:
        """Buckets that occur, or parts of them, in rising order."""
        ids = self._planned_ids
        return np.unique(ids[has_bucket(ids)])

    def _of_parts(self, parts: IntArray) -> tuple[IntArray, IntArray]:
        """Return the buckets of parts, and the tokens beside a row's own in each."""
        if self.parts is None:
            return parts, np.zeros_like(parts)
        return self.parts.bucket_ids[parts], self.parts.condition_tokens[parts]

    def _base(self) -> int:
        """Return the bucket of mixed batches; every sample must have as many frames as it."""
        base = self.table.base
        if isinstance(self.table, OpenTable):
            raise PlanError(
                '`remainder="catch_all"` needs a base bucket, which an open table lacks: samples keep their own sizes.'
            )
        if base is None:
            raise PlanError(
                '`remainder="catch_all"` needs a base bucket: give table.with_base() to the sampler and the collator.'
            )
        frames = self.table.size(base).frames
        present = np.unique(self.bucket_ids[has_bucket(self.bucket_ids)]).tolist()
        short = [str(self.table.size(bucket)) for bucket in present if self.table.size(bucket).frames < frames]
        if short:
            raise PlanError(
                f"The base bucket {self.table.size(base)} has more frames than the buckets {', '.join(short)}, whose "
                'samples cannot fill it; choose a base of fewer frames, or `remainder="short"`.'
            )
        return base

    def _costs(self, parts: IntArray) -> IntArray | FloatArray:
        """Return the cost of a sample of each bucket, or part of one, and its text; tokens without a cost model."""
        assert self.spec is not None, "longest_first needs it"
        buckets, more_tokens = self._of_parts(parts)
        tokens = self.table.num_tokens(buckets, spec=self.spec) + more_tokens + self.text_tokens
        return tokens if self.config.cost_model is None else self.config.cost_model.cost(tokens)

    def _planner(self, epoch: int) -> Callable[..., EpochPlan]:
        return self._plan_parts

    def _plan_parts(self, **epoch: Any) -> EpochPlan:
        """Plan an epoch of batches whose rows can be stacked, labelled by their buckets."""
        plan = plan_buckets(self._planned_ids, self.config, **epoch)
        return plan if self.parts is None else replace(plan, bucket_ids=self.parts.buckets_of(plan.bucket_ids))

    @property
    def _equal_epochs(self) -> bool:
        """Whether all rows occur equally often in each epoch: the steps of a bucket follow from its number of rows."""
        weights = self.weights.values() if isinstance(self.weights, Mapping) else self.weights
        return weights is None or bool(np.all(np.mod(list(weights), 1) == 0))

    def _sample_costs(self, plan: EpochPlan, epoch: int) -> IntArray | FloatArray:
        ids = self._planned_ids[plan.indices]
        if self.config.base is not None:  # rows of any bucket take its size in its batches
            of_base = np.repeat(plan.bucket_ids == self.config.base, np.diff(plan.offsets))
            ids = np.where(of_base, self.config.base, ids)
        return self._costs(ids)

    def _columns(self) -> dict[str, object]:
        columns = {"rows": self._planned_ids, "table": self.table.fingerprint}
        if not self.longest_first:
            return columns
        return {**columns, "costs": self._costs(self._present)}  # they decide which step comes first

    def _drawn_rows(self) -> BoolArray:
        return has_bucket(self.bucket_ids)

    def check_rows(self, loader: Any) -> None:
        """Raise PlanError if a loader's rows have other bucket ids, or its column or collator another table."""
        rows = loader.dataset.dataset if isinstance(loader.dataset, NumberedRows) else loader.dataset
        check_table(getattr(rows, "features", None), self.table, column="bucket_id")
        table = getattr(loader.collate_fn, "table", self.table)
        if isinstance(table, BucketTable | OpenTable) and table.ids_mark != self.table.ids_mark:
            raise PlanError(
                f"The sampler's table has {self.table.ids_mark}, but its loader's collator {table.ids_mark}; give "
                "both the table that the column was computed with."
            )
        if hasattr(loader.collate_fn, "allow_mixed"):
            loader.collate_fn.allow_mixed(self.config.remainder == "catch_all")
        super().check_rows(loader)


def _end(table: BucketTable | OpenTable) -> int:
    """Return the number above all bucket ids of a table."""
    return len(table) if isinstance(table, BucketTable) else 2**31


def _ids_in(table: BucketTable | OpenTable, bucket_ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Return bucket ids as an array of shape `(n,)`; raise PlanError if the table lacks one, or they are another's."""
    if isinstance(bucket_ids, Column):
        _check_column(bucket_ids, table)
    ids, end = column_of(bucket_ids, "bucket_ids", integer=True), _end(table)
    wrong = np.flatnonzero((ids < REJECTED_BUCKET) | (ids >= end))
    if len(wrong):
        raise PlanError(
            f"Row {wrong[0]} has bucket_id {ids[wrong[0]]}, but the table has 0 to {end - 1}, and rejected rows "
            f"{REJECTED_BUCKET}; compute the column again with this table."
        )
    return ids.astype(np.int32)


def _check_column(column: Column, table: BucketTable | OpenTable) -> None:
    """Raise PlanError if a column holds ids of another table, or if another column of its data set holds the ids."""
    features, name = column.source.features, column.column_name
    check_table(features, table, column=name)
    marked = [other for other, feature in features.items() if getattr(feature, "id", None) == table.ids_mark]
    if marked and name not in marked:
        raise PlanError(
            f"`bucket_ids` got the column {name}, but {marked[0]} holds the {table.ids_mark}; give "
            f'ds["{marked[0]}"], or remove it from the data set if {name} takes its place.'
        )


def check_table(features: Mapping[str, Any] | None, table: BucketTable | OpenTable, *, column: str) -> None:
    """Raise PlanError if a data set's column says that its bucket ids are those of another table."""
    mark = getattr((features or {}).get(column), "id", None)
    if mark is not None and mark != table.ids_mark:
        raise PlanError(
            f"`bucket_ids` were computed with another table: the column {column} holds {mark}, `table` has "
            f"{table.ids_mark}; give the table that the column was computed with, or compute it again with this one."
        )
