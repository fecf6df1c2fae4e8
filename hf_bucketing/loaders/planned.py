"""The base class of all batch samplers: an epoch plan in the form that accelerate shards, and its resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from accelerate import PartialState
from datasets import Dataset
from datasets.arrow_dataset import Column
from torch.utils.data import Sampler

from ..buckets.arrays import BoolArray, FloatArray, IntArray
from ..buckets.assignment import count_rejections
from ..errors import PlanError
from ..plans import BucketPlanConfig, EpochPlan, LengthPlanConfig, PackPlanConfig
from ..plans.rows import column_of
from ..settings import numbers_by_id, plain_bool, plain_number
from .state import VERSION, check_state, describe, settings

Config = TypeVar("Config")

logger = logging.getLogger(__name__)

Legs = tuple[tuple[int, int], ...]
"""History of the present epoch: pairs of a number of processes and the steps that they finished."""


class PlannedBatchSampler(Sampler[list[int]]):
    """Yield the batches of an epoch plan, in the form that accelerate shards.

    Without `process_index`, the batches of all processes come interleaved, a multiple of `num_processes` in all, for
    `accelerator.prepare(DataLoader(dataset, batch_sampler=sampler))`. With it, only that process's batches come, for
    plain DDP, and the loader must not be prepared.

    There is no `batch_size` attribute on purpose: with one, accelerate drops every group that holds a short batch.

    A subclass sets `config`, and defines `_planner`, `_sample_costs` and `_columns`.

    Args:
        weights (array of `float`, shape `(n,)`, or mapping of bucket id to `float`, *optional*): Occurrences of rows
            per epoch.
        longest_first (`bool`): Start every epoch with its most expensive step.
        num_processes (`int`, *optional*): Number of processes; by default that of accelerate's `PartialState` if it
            exists, else 1.
        process_index (`int`, *optional*): Process whose batches alone are yielded.

    Raises:
        PlanError: If `process_index` is not below `num_processes`.
    """

    config: BucketPlanConfig | LengthPlanConfig | PackPlanConfig

    def __init__(
        self,
        *,
        weights: npt.ArrayLike | Mapping[int, float] | None,
        longest_first: bool,
        num_processes: int | None,
        process_index: int | None,
    ) -> None:
        self.weights: Mapping[int, float] | FloatArray | None = None
        if isinstance(weights, Mapping):
            self.weights = numbers_by_id(weights, "weights", whole=False, error=PlanError)
        elif weights is not None:
            self.weights = column_of(whole_column(weights), "weights").astype(np.float64)
        self.longest_first = plain_bool(longest_first, "longest_first", error=PlanError)
        if num_processes is not None:
            num_processes = plain_number(num_processes, "num_processes", whole=True, error=PlanError)
            if num_processes < 1:
                raise PlanError(f"`num_processes` must be at least 1, got {num_processes}.")
        self._num_processes = num_processes
        self.process_index = process_index
        self.epoch = 0
        self._legs: Legs = ()
        self._cached: tuple[tuple[int, int, Legs], EpochPlan] | None = None
        self._described: tuple[int, dict[str, str]] | None = None
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

    @property
    def first_step(self) -> int:
        """First step of the present plan to yield; 0 unless the epoch was resumed."""
        return self._legs[-1][1] if self._resumes_its_plan else 0

    @property
    def _resumes_its_plan(self) -> bool:
        """Whether the last leg ran on as many processes as now, so that its plan continues."""
        return bool(self._legs) and self._legs[-1][0] == self.num_processes

    def plan(self, epoch: int | None = None) -> EpochPlan:
        """Return the plan of an epoch, by default of the present one.

        If the present epoch began on another number of processes, this is the plan of what was left of it.

        Raises:
            PlanError: If no step can be planned.
        """
        epoch = self.epoch if epoch is None else epoch
        earlier = self._legs[:-1] if self._resumes_its_plan else self._legs
        key = (epoch, self.num_processes, earlier if epoch == self.epoch else ())
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, self._plan_after(*key))
        return self._cached[1]

    def _plan_after(self, epoch: int, num_processes: int, legs: Legs) -> EpochPlan:
        consumed: IntArray | None = None
        for processes, steps in legs:
            plan = self._ordered_plan(epoch, processes, consumed)
            if steps > plan.num_steps:
                raise PlanError(
                    f"The saved sampler state has {steps} steps on {processes} processes, but epoch {epoch} has only "
                    f"{plan.num_steps} of them; it was not made by this sampler."
                )
            taken = plan.indices[: plan.offsets[steps * processes]]
            consumed = taken if consumed is None else np.concatenate([consumed, taken])
            if steps == plan.num_steps:
                return _empty_plan(num_processes, consumed=len(consumed))
        return self._ordered_plan(epoch, num_processes, consumed)

    def _ordered_plan(self, epoch: int, num_processes: int, consumed: IntArray | None) -> EpochPlan:
        plan = self._planner(epoch)(epoch=epoch, num_processes=num_processes, weights=self.weights, consumed=consumed)
        return plan.most_expensive_first(self._sample_costs(plan, epoch)) if self.longest_first else plan

    def total_steps(self, epochs: int) -> int:
        """Return the steps of epochs 0 to `epochs - 1` together; the number of steps differs between epochs.

        Raises:
            PlanError: If an epoch cannot be planned.
        """
        return sum(self._ordered_plan(epoch, self.num_processes, None).num_steps for epoch in range(epochs))

    def _planner(self, epoch: int) -> Callable[..., EpochPlan]:
        """Return the function that plans an epoch with the columns that it has; the base class adds the rest."""
        raise NotImplementedError

    def _sample_costs(self, plan: EpochPlan, epoch: int) -> IntArray | FloatArray:
        """Return the cost of each sample of a plan, in the order of `plan.indices`."""
        raise NotImplementedError

    def _columns(self) -> Mapping[str, object]:
        """Return the columns and tables that the plan depends on, by name."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the present epoch again changes nothing."""
        if epoch != self.epoch:
            self.epoch, self._legs = epoch, ()

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Return the state to resume this epoch from, as JSON values, the same on every process.

        Args:
            step (`int`, *optional*): Number of finished steps of the present plan, by default `first_step`. Only the
                training loop knows it, because workers draw batches ahead.

        Returns:
            `dict`: `version`, `fingerprint`, `seed`, `epoch` and `consumed`: pairs of a number of processes and the
            steps that they finished, in order.
        """
        seed, fingerprint = self._fingerprint()
        legs = self._legs[:-1] if self._resumes_its_plan else self._legs
        step = self.first_step if step is None else step
        consumed = [list(leg) for leg in (*legs, (self.num_processes, step)) if leg[1]]
        return {
            "version": VERSION,
            "fingerprint": fingerprint,
            "seed": seed,
            "epoch": self.epoch,
            "consumed": consumed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, on any number of processes.

        On as many processes as before, exactly the remaining batches follow; on another number, the remaining samples
        are planned anew.

        Raises:
            PlanError: If the state belongs to another version, data set, table, configuration or seed; the message
                names the difference.
        """
        seed, fingerprint = self._fingerprint()
        check_state(state, fingerprint=fingerprint, seed=seed)
        self.epoch = int(state["epoch"])
        self._legs = tuple((int(processes), int(steps)) for processes, steps in state["consumed"])

    def _fingerprint(self) -> tuple[int, dict[str, str]]:
        if self._described is None:
            parts = {**self._columns(), "weights": self.weights, "longest_first": self.longest_first}
            parts |= {name: value for name, value in settings(self.config).items() if name != "seed"}
            self._described = (self.config.seed, {name: describe(part) for name, part in parts.items()})
        return self._described

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.plan().batches(process_index=self.process_index, first_step=self.first_step)
        yield from (batch.tolist() for batch in batches)

    def __len__(self) -> int:
        steps = self.plan().num_steps - self.first_step
        return steps if self.process_index is not None else steps * self.num_processes


def _empty_plan(num_processes: int, *, consumed: int) -> EpochPlan:
    """Return the plan of a finished epoch."""
    return EpochPlan(
        indices=np.zeros(0, np.int64),
        offsets=np.zeros(1, np.int64),
        bucket_ids=np.zeros(0, np.int32),
        num_processes=num_processes,
        consumed=consumed,
    )


def config_from(kind: type[Config], arguments: Mapping[str, Any]) -> Config:
    """Return the settings of a plan, each from the sampler's argument of the same name."""
    return kind(**{field.name: arguments[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def whole_column(values: Any) -> npt.NDArray[Any]:
    """Return values as an array; a `datasets.Column` is sliced, since numpy would read it row by row."""
    return np.asarray(values[:] if isinstance(values, Column) else values)


def warn_of_rejected(
    rows: Any,
    usable: BoolArray,
    *,
    rejection: npt.ArrayLike | None = None,
    process_index: int | None = None,
) -> None:
    """Log from the main process how many rows a sampler never draws because they were rejected, and why.

    The reasons are `rejection`, or the `rejection` column of the data set that the column `rows` belongs to.

    Raises:
        PlanError: If `rejection` does not have one value per row.
    """
    if rejection is None and isinstance(rows, Column) and isinstance(rows.source, Dataset):
        rejection = rows.source["rejection"] if "rejection" in rows.source.column_names else None
    if rejection is not None and isinstance(rejection, Sequence | np.ndarray) and len(rejection) != len(usable):
        raise PlanError(f"`rejection` needs one value per row: expected {len(usable)}, got {len(rejection)}.")
    rejected = np.flatnonzero(~usable)
    if process_index is not None:
        main = process_index == 0
    else:
        main = PartialState().is_main_process if PartialState._shared_state else True
    if not len(rejected) or not main:
        return
    if rejection is None:
        why = 'pass rejection=dataset["rejection"] to see why'
    else:
        reasons = rejection[rejected.tolist()] if isinstance(rejection, Column) else np.asarray(rejection)[rejected]
        counts = count_rejections(np.asarray(reasons))
        why = (
            ", ".join(f"{count:,} {label}" for label, count in counts.items())
            or "the rejection column names no reason"
        )
    logger.warning(
        f"{len(rejected):,} of {len(usable):,} rows were rejected and are never drawn: {why}.",
    )
