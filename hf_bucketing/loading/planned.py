"""What all batch samplers share: an epoch plan in the form that accelerate shards, and its state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from accelerate import PartialState
from torch.utils.data import Sampler

from ..errors import PlanError
from ..sampling import EpochPlan
from ..sampling.plan import IntArray


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
            self._cached = (key, self._make_plan(*key, None))
        return self._cached[1]

    def _make_plan(self, epoch: int, num_processes: int, consumed: IntArray | None) -> EpochPlan:
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


def fingerprint(rows: npt.NDArray[np.int64], *parts: object) -> str:
    """Return a short digest of the rows and of everything else that a plan depends on."""
    digest = hashlib.sha256(np.ascontiguousarray(rows).data)
    digest.update(repr(parts).encode())
    return digest.hexdigest()[:16]
