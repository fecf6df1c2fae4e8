"""What all batch samplers share: an epoch plan in the form that accelerate shards, and the place in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from accelerate import PartialState
from torch.utils.data import Sampler

from ..errors import PlanError
from ..plans.epoch import EpochPlan, IntArray
from .state import VERSION, check_state, describe

Legs = tuple[tuple[int, int], ...]
"""How the present epoch has gone so far: numbers of processes, each with the steps that they finished."""


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
        """Step of the present plan with which iterating starts; 0 unless the epoch was resumed."""
        return self._legs[-1][1] if self._resumes_its_plan else 0

    @property
    def _resumes_its_plan(self) -> bool:
        """Whether the last leg ran on as many processes as now, so that its plan goes on."""
        return bool(self._legs) and self._legs[-1][0] == self.num_processes

    def plan(self, epoch: int | None = None) -> EpochPlan:
        """Return the plan of an epoch, by default of the present one.

        Where the present epoch was begun on another number of processes, this is the plan of what was left of it.

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
            plan = self._make_plan(epoch, processes, consumed)
            if steps > plan.num_steps:
                raise PlanError(
                    f"The saved sampler state has {steps} steps on {processes} processes, but epoch {epoch} has only "
                    f"{plan.num_steps} of them; it was not made by this sampler."
                )
            taken = plan.indices[: plan.offsets[steps * processes]]
            consumed = taken if consumed is None else np.concatenate([consumed, taken])
            if steps == plan.num_steps:
                return _empty_plan(num_processes, consumed=len(consumed))
        return self._make_plan(epoch, num_processes, consumed)

    def _make_plan(self, epoch: int, num_processes: int, consumed: IntArray | None) -> EpochPlan:
        """Plan an epoch, or what is left of it after the rows `consumed`."""
        raise NotImplementedError

    def _identity(self) -> Mapping[str, object]:
        """Return all that the plan depends on beside epoch and processes, by name, `seed` among it."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate, from its start; the present epoch again changes nothing."""
        if epoch != self.epoch:
            self.epoch, self._legs = epoch, ()

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Return what resumes this epoch, as JSON values, the same on every process.

        Args:
            step (`int`, *optional*): Steps of the present plan that are finished, `first_step` by default. Only the
                training loop knows: workers draw batches ahead of it.

        Returns:
            `dict`: `version`, `fingerprint`, `seed`, `epoch` and `consumed`, pairs of a number of processes and the
            steps that they finished, in the order in which they ran.
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
        """Continue where `state` stood, on any number of processes.

        With as many processes as before, the batches are the very ones that were left; with another number, the
        samples that were left are planned anew.

        Raises:
            PlanError: If the state is of another version, data set, table, configuration or seed; the message says
                which of them differs.
        """
        seed, fingerprint = self._fingerprint()
        check_state(state, fingerprint=fingerprint, seed=seed)
        self.epoch = int(state["epoch"])
        self._legs = tuple((int(processes), int(steps)) for processes, steps in state["consumed"])

    def _fingerprint(self) -> tuple[int, dict[str, str]]:
        if self._described is None:
            parts = dict(self._identity())
            seed = parts.pop("seed")
            assert isinstance(seed, int), "every plan has a seed"
            self._described = (seed, {name: describe(part) for name, part in parts.items()})
        return self._described

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.plan().batches(process_index=self.process_index, first_step=self.first_step)
        yield from (batch.tolist() for batch in batches)

    def __len__(self) -> int:
        steps = self.plan().num_steps - self.first_step
        return steps if self.process_index is not None else steps * self.num_processes


def _empty_plan(num_processes: int, *, consumed: int) -> EpochPlan:
    """Return the plan of an epoch of which nothing is left."""
    return EpochPlan(
        indices=np.zeros(0, np.int64),
        offsets=np.zeros(1, np.int64),
        bucket_ids=np.zeros(0, np.int32),
        num_processes=num_processes,
        consumed=consumed,
    )
