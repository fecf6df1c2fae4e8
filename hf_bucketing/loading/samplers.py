"""Batch samplers for `DataLoader(batch_sampler=…)` that accelerate shards over processes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..buckets import BucketTable
from ..errors import PlanError
from ..geometry import LatentSpec
from ..open_table import OpenTable
from ..sampling import BucketPlanConfig, EpochPlan, PackPlanConfig, plan_buckets, plan_packs
from ..sampling.deal import TailPolicy
from ..sampling.plan import IntArray
from .planned import PlannedBatchSampler
from .state import settings


class BucketBatchSampler(PlannedBatchSampler):
    """Draw batches of one bucket, in lockstep: all processes take the same bucket in the same step.

    Args:
        bucket_ids (array of `int`, shape `(n,)`): The data set's `bucket_id` column; −1 rows are never drawn.
        table ([`BucketTable`] or [`OpenTable`]): The table that the ids belong to.
        batch_size (`int` or mapping of bucket id to `int`, *optional*): Samples per process and step.
        capacity (`int`, *optional*): Tokens per process and step, instead of `batch_size`: each bucket gets as many
            samples as fit. Needs `spec`.
        spec ([`LatentSpec`], *optional*): Strides and patch, for `capacity`.
        tail (`"short"` or `"drop"`): See [`BucketPlanConfig`][hf_bucketing.sampling.BucketPlanConfig].
        seed (`int`): Order of the epochs.
        num_processes (`int`, *optional*): Defaults to accelerate's.
        process_index (`int`, *optional*): For plain DDP; see [`PlannedBatchSampler`].

    Raises:
        PlanError: If not exactly one of `batch_size` and `capacity` is given, an id is not in the table, or a bucket
            exceeds the capacity.
    """

    def __init__(
        self,
        bucket_ids: npt.ArrayLike,
        *,
        table: BucketTable | OpenTable,
        batch_size: int | Mapping[int, int] | None = None,
        capacity: int | None = None,
        spec: LatentSpec | None = None,
        tail: TailPolicy = "short",
        seed: int = 0,
        num_processes: int | None = None,
        process_index: int | None = None,
    ) -> None:
        super().__init__(num_processes=num_processes, process_index=process_index)
        self.bucket_ids = np.asarray(bucket_ids, np.int64)
        self.table = table
        if isinstance(table, BucketTable) and len(self.bucket_ids) and self.bucket_ids.max() >= len(table):
            raise PlanError(
                f"Row {self.bucket_ids.argmax()} has bucket_id {self.bucket_ids.max()}, but the table ends at "
                f"{len(table) - 1}; compute the column again with this table."
            )
        if (batch_size is None) == (capacity is None):
            raise PlanError("Give either batch_size or capacity.")
        if batch_size is None:
            batch_size = self._sizes_for(capacity, spec)
        self.config = BucketPlanConfig(batch_size=batch_size, tail=tail, seed=seed)

    def _sizes_for(self, capacity: int | None, spec: LatentSpec | None) -> dict[int, int]:
        if spec is None or capacity is None:
            raise PlanError("capacity counts tokens: pass spec=LatentSpec(…) with it.")
        present = np.unique(self.bucket_ids[self.bucket_ids >= 0])
        tokens = self.table.num_tokens(present, spec=spec)
        if len(tokens) and tokens.max() > capacity:
            size = self.table.size(int(present[tokens.argmax()]))
            raise PlanError(
                f"One sample of bucket {size} takes {tokens.max()} tokens and exceeds capacity={capacity}."
            )
        return dict(zip(present.tolist(), (capacity // tokens).tolist(), strict=True)) or {0: 1}

    def _make_plan(self, epoch: int, num_processes: int, consumed: IntArray | None) -> EpochPlan:
        return plan_buckets(self.bucket_ids, self.config, epoch=epoch, num_processes=num_processes, consumed=consumed)

    def _identity(self) -> dict[str, object]:
        return {"rows": self.bucket_ids, "table": self.table.fingerprint, **settings(self.config)}


class PackBatchSampler(PlannedBatchSampler):
    """Draw packs: samples of any size whose tokens together fit a capacity.

    Args:
        num_tokens (array of `int`, shape `(n,)`): The data set's `num_tokens` column; rows of 0 are never drawn.
        capacity (`int`): Tokens per process and step.
        strategy (`"first_fit"`): See [`PackPlanConfig`][hf_bucketing.sampling.PackPlanConfig].
        open_packs (`int`): Packs held open at once.
        max_samples (`int`, *optional*): Largest number of samples per pack.
        multiple (`int`): Set it to the packs' `strip_length`: each sample takes whole strips.
        seed (`int`): Order of the epochs.
        num_processes (`int`, *optional*): Defaults to accelerate's.
        process_index (`int`, *optional*): For plain DDP; see [`PlannedBatchSampler`].

    Raises:
        PlanError: On a value below 1. A row above the capacity is an error when the first epoch is planned.
    """

    def __init__(
        self,
        num_tokens: npt.ArrayLike,
        *,
        capacity: int,
        strategy: str = "first_fit",
        open_packs: int = 16,
        max_samples: int | None = None,
        multiple: int = 1,
        seed: int = 0,
        num_processes: int | None = None,
        process_index: int | None = None,
    ) -> None:
        super().__init__(num_processes=num_processes, process_index=process_index)
        self.num_tokens = np.asarray(num_tokens, np.int64)
        self.config = PackPlanConfig(
            capacity=capacity,
            strategy=strategy,  # type: ignore[arg-type]  # the config names the ones it knows
            open_packs=open_packs,
            max_samples=max_samples,
            multiple=multiple,
            seed=seed,
        )

    def _make_plan(self, epoch: int, num_processes: int, consumed: IntArray | None) -> EpochPlan:
        return plan_packs(self.num_tokens, self.config, epoch=epoch, num_processes=num_processes, consumed=consumed)

    def _identity(self) -> dict[str, object]:
        return {"rows": self.num_tokens, **settings(self.config)}
