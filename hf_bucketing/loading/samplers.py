"""Batch samplers for `DataLoader(batch_sampler=…)` that accelerate shards over processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from accelerate import PartialState
from torch.utils.data import Sampler

from ..buckets import BucketTable
from ..errors import PlanError
from ..geometry import LatentSpec
from ..open_table import OpenTable
from ..sampling import BucketPlanConfig, EpochPlan, PackPlanConfig, plan_buckets, plan_packs
from ..sampling.bucket_plan import TailPolicy


class PlannedBatchSampler(Sampler[list[int]]):
    """Yield the batches of an epoch plan, in the form that accelerate shards.

    Without `process_index`, the batches of all processes come interleaved, a multiple of `num_processes` in all, for
    `accelerator.prepare(DataLoader(dataset, batch_sampler=sampler))`. With it, only that process's batches come, for
    plain DDP, and the loader must not be prepared.

    There is no `batch_size` attribute on purpose: with one, accelerate drops every group that holds a short batch.

    Args:
        num_processes (`int`, *optional*): Defaults to accelerate's `PartialState` if it is up, else to 1.
        process_index (`int`, *optional*): Yield this process's batches alone.

    Raises:
        PlanError: If `process_index` is not below `num_processes`.
    """

    def __init__(self, *, num_processes: int | None, process_index: int | None) -> None:
        self._num_processes = num_processes
        self.process_index = process_index
        self.epoch = 0
        self._first_step = 0
        self._cached: tuple[tuple[int, int], EpochPlan] | None = None
        if process_index is not None and not 0 <= process_index < self.num_processes:
            raise PlanError(f"process_index={process_index} must be from 0 to {self.num_processes - 1}.")

    @property
    def num_processes(self) -> int:
        """Processes that share the batches."""
        if self._num_processes is not None:
            return self._num_processes
        return PartialState().num_processes if PartialState._shared_state else 1

    @property
    def sampler(self) -> PlannedBatchSampler:
        """This sampler: with two or more processes, accelerate sets the epoch on `batch_sampler.sampler` only."""
        return self

    def plan(self, epoch: int | None = None) -> EpochPlan:
        """Return the plan of an epoch, by default of the present one.

        Raises:
            PlanError: If no step can be planned.
        """
        key = (self.epoch if epoch is None else epoch, self.num_processes)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, self._make_plan(*key))
        return self._cached[1]

    def _make_plan(self, epoch: int, num_processes: int) -> EpochPlan:
        raise NotImplementedError

    def _identity(self) -> str:
        """Return a fingerprint of everything but epoch and processes that the plan depends on."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration yields; the same epoch again changes nothing."""
        if epoch != self.epoch:
            self.epoch, self._first_step = epoch, 0

    def state_dict(self, *, step: int = 0) -> dict[str, Any]:
        """Return what resumes this epoch after `step` steps, as JSON values, the same on every process.

        Only the training loop knows how many steps it has finished: workers draw batches ahead of it.
        """
        return {"version": 1, "fingerprint": self._identity(), "epoch": self.epoch, "step": step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` stood: the next iteration, alone, starts after its `step`.

        Raises:
            PlanError: If the state is of another version, data set, table or configuration.
        """
        expected = {"version": 1, "fingerprint": self._identity()}
        for name, value in expected.items():
            if state.get(name) != value:
                raise PlanError(
                    f"The saved sampler state has {name} {state.get(name)!r}, this sampler {value!r}: the rows, the "
                    "table, the batch configuration or the seed differ. Resume with those of the saved run."
                )
        self.epoch, self._first_step = int(state["epoch"]), int(state["step"])

    def __iter__(self) -> Iterator[list[int]]:
        first_step, self._first_step = self._first_step, 0
        plan = self.plan()
        yield from (batch.tolist() for batch in plan.batches(process_index=self.process_index, first_step=first_step))

    def __len__(self) -> int:
        plan = self.plan()
        return plan.num_batches if self.process_index is None else plan.num_steps


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

    def _make_plan(self, epoch: int, num_processes: int) -> EpochPlan:
        return plan_buckets(self.bucket_ids, self.config, epoch=epoch, num_processes=num_processes)

    def _identity(self) -> str:
        return _fingerprint(self.bucket_ids, self.table.fingerprint, self.config)


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

    def _make_plan(self, epoch: int, num_processes: int) -> EpochPlan:
        return plan_packs(self.num_tokens, self.config, epoch=epoch, num_processes=num_processes)

    def _identity(self) -> str:
        return _fingerprint(self.num_tokens, "", self.config)


def _fingerprint(rows: npt.NDArray[np.int64], *parts: object) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(rows).data)
    digest.update(repr(parts).encode())
    return digest.hexdigest()[:16]
