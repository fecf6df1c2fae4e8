"""The bucket batch sampler: batches of one size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..buckets.cost import CostModel
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..errors import PlanError
from ..plans.buckets import BucketPlanConfig, plan_buckets
from ..plans.epoch import MIXED, EpochPlan, IntArray
from .planned import PlannedBatchSampler
from .rejected import warn_of_rejected
from .state import settings


class BucketBatchSampler(PlannedBatchSampler):
    """Draw batches of one bucket, by default in lockstep: all processes take the same bucket in the same step.

    Args:
        bucket_ids (array of `int`, shape `(n,)`): The data set's `bucket_id` column; −1 rows are never drawn.
        table ([`BucketTable`] or [`OpenTable`]): The table that the ids belong to.
        batch_size (`int` or mapping of bucket id to `int`, *optional*): Samples per process and step.
        capacity (`float`, *optional*): Tokens per process and step, instead of `batch_size`: each bucket gets as many
            samples as fit. With a `cost_model`, cost per process and step. Needs `spec`.
        spec ([`LatentSpec`], *optional*): Strides and patch, for `capacity` and `longest_first`; an open table has its
            own.
        cost_model ([`CostModel`][hf_bucketing.CostModel], *optional*): What a sample costs, if not its tokens.
        weights (array of `float`, shape `(n,)`, or mapping of bucket id to `float`, *optional*): How often each row,
            or each row of a bucket, comes per epoch; see [`plan_buckets`][hf_bucketing.plans.plan_buckets].
        rejection (array, shape `(n,)`, *optional*): The data set's `rejection` column, for the warning that counts
            rejected rows by reason; not needed where `bucket_ids` is a column of that data set.
        longest_first (`bool`): Start every epoch with its most expensive step, to run out of memory at once or never.
        num_processes (`int`, *optional*): Defaults to accelerate's.
        process_index (`int`, *optional*): For plain DDP; see [`PlannedBatchSampler`].
        **options: `tail`, `lockstep` and `seed` of [`BucketPlanConfig`][hf_bucketing.plans.BucketPlanConfig]. With
            `tail="catch_all"`, mixed batches get the size of the table's `base` bucket.

    Raises:
        PlanError: If not exactly one of `batch_size` and `capacity` is given, an id is not in the table, a bucket
            exceeds the capacity, `weights` names a bucket that the table has not, or `tail="catch_all"` has no base
            bucket or one of too many frames.
    """

    def __init__(
        self,
        bucket_ids: npt.ArrayLike,
        *,
        table: BucketTable | OpenTable,
        batch_size: int | Mapping[int, int] | None = None,
        capacity: float | None = None,
        spec: LatentSpec | None = None,
        cost_model: CostModel | None = None,
        weights: npt.ArrayLike | Mapping[int, float] | None = None,
        rejection: npt.ArrayLike | None = None,
        longest_first: bool = False,
        num_processes: int | None = None,
        process_index: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_processes=num_processes, process_index=process_index)
        ids = np.asarray(bucket_ids, np.int64)
        end = len(table) if isinstance(table, BucketTable) else 2**31
        if len(ids) and ids.max() >= end:
            raise PlanError(
                f"Row {ids.argmax()} has bucket_id {ids.max()}, but the table ends at {end - 1}; compute the column "
                "again with this table."
            )
        self.bucket_ids = ids.astype(np.int32)
        warn_of_rejected(bucket_ids, ids >= 0, rejection=rejection, process_index=process_index)
        self.table = table
        self.cost_model = cost_model
        self.weights = weights if weights is None or isinstance(weights, Mapping) else np.asarray(weights, np.float64)
        self.spec = table.spec if spec is None and isinstance(table, OpenTable) else spec
        self.longest_first = longest_first
        unknown = [bucket for bucket in weights if not 0 <= bucket < end] if isinstance(weights, Mapping) else []
        if unknown:
            raise PlanError(f"weights names the buckets {unknown}, but the table has 0 to {end - 1}.")
        if (batch_size is None) == (capacity is None):
            raise PlanError("Give either batch_size or capacity.")
        if self.spec is None and (capacity is not None or longest_first):
            raise PlanError("capacity and longest_first count tokens: pass spec=LatentSpec(…) with them.")
        base = self._base() if options.get("tail") == "catch_all" else None
        if batch_size is None:
            batch_size = self._sizes_for(capacity or 0, base)
        self.config = BucketPlanConfig(batch_size=batch_size, base=base, **options)

    def _base(self) -> int:
        """Return the bucket of mixed batches, whose frames every sample must have."""
        base = self.table.base
        if isinstance(self.table, OpenTable):
            raise PlanError(
                'tail="catch_all" needs a base bucket, which an open table has not: each sample keeps its own size.'
            )
        if base is None:
            raise PlanError(
                '`tail="catch_all"` needs a base bucket: give table.with_base() to the sampler and to the collator.'
            )
        frames = self.table.size(base).frames
        present = np.unique(self.bucket_ids[self.bucket_ids >= 0]).tolist()
        short = [str(self.table.size(bucket)) for bucket in present if self.table.size(bucket).frames < frames]
        if short:
            raise PlanError(
                f"The base bucket {self.table.size(base)} has more frames than the buckets {', '.join(short)}, whose "
                'samples cannot fill it; choose a base of fewer frames, or `tail="short"`.'
            )
        return base

    def _costs(self, bucket_ids: IntArray) -> npt.NDArray[np.float64]:
        """Return the cost of a sample of each bucket, in tokens without a cost model."""
        assert self.spec is not None
        tokens = self.table.num_tokens(bucket_ids, spec=self.spec)
        return tokens.astype(np.float64) if self.cost_model is None else self.cost_model.cost(tokens)

    def _sizes_for(self, capacity: float, base: int | None) -> dict[int, int]:
        present = np.unique(self.bucket_ids[self.bucket_ids >= 0]).astype(np.int64)
        present = present if base is None else np.union1d(present, [base])
        costs = self._costs(present)
        if len(costs) and costs.max() > capacity:
            size = self.table.size(int(present[costs.argmax()]))
            unit = "tokens" if self.cost_model is None else "units of cost"
            raise PlanError(
                f"One sample of bucket {size} takes {costs.max():.6g} {unit} and exceeds `capacity={capacity}`.",
                advice=["raise `capacity`", "choose a table of smaller buckets"],
            )
        return dict(zip(present.tolist(), (capacity // costs).astype(int).tolist(), strict=True)) or {0: 1}

    def _make_plan(self, epoch: int, num_processes: int, consumed: IntArray | None) -> EpochPlan:
        plan = plan_buckets(
            self.bucket_ids,
            self.config,
            epoch=epoch,
            num_processes=num_processes,
            weights=self.weights,
            consumed=consumed,
        )
        if not self.longest_first:
            return plan
        batch_bucket = np.repeat(plan.bucket_ids, np.diff(plan.offsets))
        return plan.most_expensive_first(
            self._costs(np.where(batch_bucket == MIXED, self.bucket_ids[plan.indices], batch_bucket))
        )

    def _identity(self) -> dict[str, object]:
        return {
            "rows": self.bucket_ids,
            "table": self.table.fingerprint,
            "weights": self.weights,
            "longest_first": self.longest_first,
            **settings(self.config),
        }
