"""The base class of all batch samplers: an epoch plan in the form that accelerate shards, and its resume."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from accelerate import PartialState
from torch.utils.data import Sampler

from ..buckets.arrays import BoolArray, FloatArray, IntArray
from ..errors import PlanError
from ..plans import BucketPlanConfig, EpochPlan, LengthPlanConfig, PackPlanConfig
from ..plans.rows import column_of, earlier_occurrences
from ..settings import numbers_by_id, plain_bool, plain_number
from .occurrences import RepeatedRow
from .processes import (
    check_host,
    current_loader,
    group_rank,
    num_sharing,
    process_rank,
    processes_started,
    skipped_by,
)
from .row_column import RowColumn
from .state import VERSION, check_state, describe, epoch_number


@dataclass(kw_only=True)
class Drawn:
    """Count of the batches that an iteration handed out.

    Args:
        first_step (`int`): Step of the plan with which the iteration begins.
        num_steps (`int`): Steps of the plan.
        batches_per_step (`int`): Batches of one step: those of all processes, or of one.
        batches (`int`): Batches that were handed out.
    """

    first_step: int
    num_steps: int
    batches_per_step: int
    batches: int = 0

    @property
    def step(self) -> int:
        """Steps of the plan that are finished if what was handed out is."""
        return self.first_step + self.batches // self.batches_per_step

    @property
    def ended(self) -> bool:
        """Whether no batch is left."""
        return self.step >= self.num_steps


class DrawnBatches(Iterator[list[int]]):
    """Iterate batches, and count them.

    Args:
        batches (iterator): Batches to hand out.
        drawn ([`Drawn`]): Their count.
        before_first (callable): Called before the first batch is handed out.
        next_epoch (callable): Puts the sampler at the start of its next epoch.
    """

    def __init__(
        self,
        batches: Iterator[list[int]],
        drawn: Drawn,
        *,
        before_first: Callable[[], None],
        next_epoch: Callable[[], None],
    ) -> None:
        self._batches = batches
        self._drawn = drawn
        self._before_first = before_first
        self._next_epoch = next_epoch

    def __next__(self) -> list[int]:
        batch = next(self._batches)
        if not self._drawn.batches:
            self._before_first()
        self._drawn.batches += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the sampler's state holds the place."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the next epoch if the loaded one has ended.

        torchdata's StatefulDataLoader calls this after the sampler has loaded its state, in the first `iter` after
        loading (`torchdata/stateful_dataloader/stateful_dataloader.py`). Where the epoch had ended, it then begins
        another iteration, and the training loop had no chance to call `set_epoch` in between.
        """
        if self._drawn.ended:
            self._next_epoch()


logger = logging.getLogger(__name__)

Legs = tuple[tuple[int, int], ...]
"""History of the present epoch: pairs of a number of processes and the steps that they finished."""


_COUNTED_ROWS = 500_000
"""Most rows that are planned only to count the steps of later epochs, with `_ROWS_OF_A_PLAN` for each plan."""

_ROWS_OF_A_PLAN = 500


class StepCount(NamedTuple):
    """Steps of some epochs, and whether that is their number or an estimate."""

    steps: int
    exact: bool

    def __str__(self) -> str:
        return str(self.steps) if self.exact else f"about {self.steps}"


class PlannedBatchSampler(Sampler[list[int]]):
    """Yield the batches of an epoch plan, in the form that accelerate shards.

    Under accelerate, the batches of all processes come interleaved, a multiple of `num_processes` in all, for
    `accelerator.prepare(DataLoader(dataset, batch_sampler=sampler))`. Under plain DDP only this process's batches
    come, and the loader must not be prepared (Lightning: `Trainer(use_distributed_sampler=False)`).

    A prepared loader tells the sampler the epoch whenever it is iterated, also inside `skip_first_batches`, and the
    sampler tells the collator. The sampler refuses a loader that would lose batches. A plain `DataLoader` tells it
    nothing: call [`set_epoch`][hf_bucketing.loaders.PlannedBatchSampler.set_epoch] before every epoch, without which
    all epochs have the batches of the first, and the second one is warned of.

    Where training holds a row a second time in an epoch, its number comes as a
    [`RepeatedRow`][hf_bucketing.loaders.occurrences.RepeatedRow], an `int` that also says which occurrence it is; see
    [`NumberedRows`][hf_bucketing.loaders.NumberedRows].

    There is no `batch_size` attribute on purpose: with one, accelerate drops every group that holds a short batch.

    A subclass defines `_planner`, `_sample_costs` and `_columns`.

    Args:
        config ([`BucketPlanConfig`][hf_bucketing.plans.BucketPlanConfig], …): Settings of the plan.
        num_rows (`int`): Rows of the data set.
        weights (array of `float`, shape `(n,)`, or mapping of bucket id to `float`, *optional*): Occurrences per epoch
            of each row, by default 1, or with buckets of each row of a bucket; see
            [`plan_buckets`][hf_bucketing.plans.plan_buckets].
        longest_first (`bool`): Start every epoch with its most expensive step, so that a lack of memory shows at once:
            by cost with a `cost_model`, else by tokens, or by samples × longest where samples differ in length alone.
        num_processes (`int`, *optional*): Number of processes; by default accelerate's, of a device mesh only the
            data-parallel ranks, else that of torch.distributed, else the launcher's `WORLD_SIZE`, else 1. Where these
            differ, it is an error.
        process_index (`int`, *optional*): Process whose batches alone are yielded; by default the rank, if
            torch.distributed runs without accelerate.

    Raises:
        PlanError: If `process_index` is not below `num_processes`, or `evaluation` meets `weights` or `longest_first`;
            while iterating, if nothing says which of several processes this is, or another number of them runs than
            `total_steps` counted for.
    """

    def __init__(
        self,
        config: BucketPlanConfig | LengthPlanConfig | PackPlanConfig,
        *,
        num_rows: int,
        weights: npt.ArrayLike | Mapping[int, float] | None,
        longest_first: bool,
        num_processes: int | None,
        process_index: int | None,
    ) -> None:
        self.config = config
        self.num_rows = num_rows
        self.weights: Mapping[int, float] | FloatArray | None = None
        if isinstance(weights, Mapping):
            self.weights = numbers_by_id(weights, "weights", integer=False, error=PlanError)
        elif weights is not None:
            self.weights = column_of(weights, "weights").astype(np.float64)
        self.longest_first = plain_bool(longest_first, "longest_first", error=PlanError)
        if num_processes is not None:
            num_processes = plain_number(num_processes, "num_processes", integer=True, error=PlanError)
            if num_processes < 1:
                raise PlanError(f"`num_processes` must be at least 1, got {num_processes}.")
        if config.evaluation and (longest_first or weights is not None):
            raise PlanError(
                "`evaluation=True` takes every row once, in order; leave `weights` and `longest_first` out."
            )
        self._num_processes = num_processes
        self._process_index = process_index
        self._loader: weakref.ref[Any] | None = None
        self.epoch = 0
        self._legs: Legs = ()
        self._cached: tuple[tuple[int, int, Legs], EpochPlan, IntArray] | None = None
        self._counted: dict[tuple[int, int], int] = {}
        self._counted_for: int | None = None
        self._column: RowColumn | None = None
        self._drawn: Drawn | None = None
        self._warned = False
        self._described: tuple[int, dict[str, str]] | None = None
        if process_index is not None and not 0 <= process_index < self.num_processes:
            raise PlanError(f"process_index={process_index} must be from 0 to {self.num_processes - 1}.")

    @property
    def num_processes(self) -> int:
        """Processes that share the batches.

        Raises:
            PlanError: If accelerate, torch.distributed and `WORLD_SIZE` say different numbers.
        """
        return num_sharing() if self._num_processes is None else self._num_processes

    @property
    def process_index(self) -> int | None:
        """Process whose batches alone are yielded; None if accelerate shares them out, or there is one process."""
        if self._process_index is not None or PartialState._shared_state:
            return self._process_index
        return group_rank(self.num_processes)

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
        return self._plan_and_consumed(self.epoch if epoch is None else epoch_number(epoch))[0]

    def _plan_and_consumed(self, epoch: int) -> tuple[EpochPlan, IntArray]:
        """Return the plan of an epoch, and the rows that the epoch held before it."""
        earlier = self._legs[:-1] if self._resumes_its_plan else self._legs
        key = (epoch, self.num_processes, earlier if epoch == self.epoch else ())
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, *self._plan_after(*key))
        return self._cached[1:]

    def _plan_after(self, epoch: int, num_processes: int, legs: Legs) -> tuple[EpochPlan, IntArray]:
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
                return EpochPlan.without_steps(num_processes, consumed=len(consumed)), consumed
        plan = self._ordered_plan(epoch, num_processes, consumed)
        return plan, np.zeros(0, np.int64) if consumed is None else consumed

    def _ordered_plan(self, epoch: int, num_processes: int, consumed: IntArray | None) -> EpochPlan:
        plan = self._planner(epoch)(epoch=epoch, num_processes=num_processes, weights=self.weights, consumed=consumed)
        return plan.most_expensive_first(self._sample_costs(plan, epoch)) if self.longest_first else plan

    def total_steps(self, epochs: int) -> int:
        """Return the steps of epochs 0 to `epochs - 1` together; the number of steps differs between epochs.

        For transformers.Trainer, which takes all epochs to be as long as the first, see
        [`EqualEpochs`][hf_bucketing.loaders.EqualEpochs].

        Raises:
            PlanError: If an epoch cannot be planned.
        """
        epochs = plain_number(epochs, "epochs", integer=True, error=PlanError)
        self._counted_for = self.num_processes
        if self._equal_epochs:
            return epochs * self._steps_of(0, self.num_processes)
        return sum(self._steps_of(epoch, self.num_processes) for epoch in range(epochs))

    def count_steps(self, start: int, stop: int, *, accumulation_steps: int = 1) -> StepCount:
        """Return the optimizer steps of epochs `start` to `stop - 1` together, in a second or two.

        The number is exact if all epochs are equally long, or few enough to plan them now. Of many, the first ones are
        planned, and the others are taken to be as long in the mean.

        Args:
            start (`int`): First epoch.
            stop (`int`): The epoch after the last one.
            accumulation_steps (`int`): Batches per optimizer step; what is left at the end of an epoch makes one too.

        Raises:
            PlanError: If an epoch cannot be planned.
        """
        epochs = max(0, stop - start)
        counted = min(epochs, 1 if self._equal_epochs else max(1, _COUNTED_ROWS // (self.num_rows + _ROWS_OF_A_PLAN)))
        first = (self._steps_of(start + epoch, self.num_processes) for epoch in range(counted))
        steps = sum(math.ceil(number / accumulation_steps) for number in first)
        exact = counted == epochs or self._equal_epochs
        return StepCount(steps if counted == epochs else round(steps * epochs / counted), exact)

    def _steps_of(self, epoch: int, num_processes: int) -> int:
        """Return the steps of a whole epoch, which is planned once for that."""
        key = (epoch, num_processes)
        if key not in self._counted:
            self._counted[key] = self._ordered_plan(*key, None).num_steps
        return self._counted[key]

    @property
    def _equal_epochs(self) -> bool:
        """Whether every epoch has as many steps, whatever its order."""
        return False

    def _planner(self, epoch: int) -> Callable[..., EpochPlan]:
        """Return the function that plans an epoch with the columns that it has; the base class adds the rest."""
        raise NotImplementedError

    def _sample_costs(self, plan: EpochPlan, epoch: int) -> IntArray | FloatArray:
        """Return the cost of each sample of a plan, in the order of `plan.indices`."""
        raise NotImplementedError

    def _columns(self) -> Mapping[str, object]:
        """Return the columns and tables that the plan depends on, by name."""
        raise NotImplementedError

    def check_rows(self, loader: Any) -> None:
        """Raise PlanError if a loader's rows or collator are not those that the sampler was made for."""
        if self._column is not None:
            self._column.check(loader.dataset, drawn=self._drawn_rows())

    def _drawn_rows(self) -> BoolArray:
        """Return which rows may be drawn, shape `(n,)`."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the present epoch again changes nothing.

        Raises:
            PlanError: If it is no whole number from 0.
        """
        epoch = epoch_number(epoch)
        self._loader = None
        if epoch != self.epoch:
            self.epoch, self._legs = epoch, ()
            self._drawn = None
        elif self._drawn is not None and self._drawn.ended:
            self._drawn = None  # it is iterated again on purpose

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Return the state to resume this epoch from, as JSON values, the same on every process.

        Args:
            step (`int`, *optional*): Number of finished steps of the present plan, by default those whose batches
                were handed out, as torchdata's StatefulDataLoader needs it, which saves the state of each batch.
                Where another loader draws ahead, in workers or by accelerate, only the training loop knows the number.

        Returns:
            `dict`: `version`, `fingerprint`, `seed`, `epoch` and `consumed`: pairs of a number of processes and the
            steps that they finished, in order.

        Raises:
            PlanError: If there is no `step` and a loader of accelerate, which draws ahead, is inside the epoch.
        """
        seed, fingerprint = self._fingerprint()
        legs = self._legs[:-1] if self._resumes_its_plan else self._legs
        step = self._steps_drawn() if step is None else plain_number(step, "step", integer=True, error=PlanError)
        consumed = [list(leg) for leg in (*legs, (self.num_processes, step)) if leg[1]]
        return {
            "version": VERSION,
            "fingerprint": fingerprint,
            "seed": seed,
            "epoch": self.epoch,
            "consumed": consumed,
        }

    def _steps_drawn(self) -> int:
        """Return the steps whose batches were handed out; raise PlanError inside an epoch of accelerate's loader."""
        if self._drawn is None:
            return self.first_step
        loader, inside = current_loader(self), self._drawn.batches and not self._drawn.ended
        if loader is not None and inside and not hasattr(loader.base_dataloader, "state_dict"):
            raise PlanError(
                "accelerate's loader draws ahead, so that the sampler cannot know the finished steps: give "
                "state_dict(step=…), or iterate resume(accelerator, loader), whose place save_state holds."
            )
        return self._drawn.step

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
        self._loader = self._drawn = None
        self.epoch = int(state["epoch"])
        self._legs = tuple((int(processes), int(steps)) for processes, steps in state["consumed"])

    def _fingerprint(self) -> tuple[int, dict[str, str]]:
        if self._described is None:
            parts = {**self._columns(), "weights": self.weights, "longest_first": self.longest_first}
            parts |= self.config.named_in_states()
            self._described = (self.config.seed, {name: describe(part) for name, part in parts.items()})
        return self._described

    def __iter__(self) -> Iterator[list[int]]:
        loader = current_loader(self)
        if loader is not None:
            self._follow(loader)
        self._check_processes()
        plan, consumed = self._plan_and_consumed(self.epoch)
        if loader is not None and self.config.evaluation:
            # gather_for_metrics keeps so many samples of the last step; 0 means all.
            loader.remainder = plan.num_processes - plan.repeated if plan.repeated else 0
        again = loader is None and self._drawn is not None and self._drawn.ended
        process_index, first_step = self.process_index, self.first_step
        self._drawn = Drawn(
            first_step=first_step,
            num_steps=plan.num_steps,
            batches_per_step=plan.num_processes if process_index is None else 1,
        )
        return DrawnBatches(
            self._batches(plan, consumed, process_index=process_index, first_step=first_step),
            self._drawn,
            before_first=partial(self._warn_of_repeats, again),
            next_epoch=lambda: self.set_epoch(self.epoch + 1),
        )

    def _warn_of_repeats(self, again: bool) -> None:
        """Warn once of an epoch that begins `again` because nobody chose the next one, where epochs differ."""
        differ = self.config.shuffle or self.weights is not None
        if not again or not differ or self.config.evaluation or self._warned:
            return
        self._warned = True
        if (process_rank() if self.process_index is None else self.process_index) in (None, 0):
            logger.warning(
                f"Epoch {self.epoch} comes again, in the same order, because nobody chose the next one: call "
                "sampler.set_epoch(epoch) before each epoch, and collator.set_epoch(epoch) where the collator draws "
                "views, or prepare the loader with accelerate, which does both."
            )

    def _batches(self, plan: EpochPlan, consumed: IntArray, **at: Any) -> Iterator[list[int]]:
        """Return batches of a plan, from a step on and of one process or all, with the repeated rows marked."""
        batches = (batch.tolist() for batch in plan.batches(**at))
        repeats = not self.config.evaluation and (self.weights is not None or plan.repeated > 0)
        earlier = earlier_occurrences(plan.indices, before=consumed) if repeats else None
        if earlier is None:
            return batches
        occurrences = replace(plan, indices=earlier).batches(**at)
        return (
            [RepeatedRow(row, times) if times else row for row, times in zip(batch, numbers.tolist(), strict=True)]
            for batch, numbers in zip(batches, occurrences, strict=True)
        )

    def _check_processes(self) -> None:
        """Raise PlanError if another number of processes iterates than was counted for, or none knows its batches."""
        if self._counted_for not in (None, self.num_processes):
            raise PlanError(
                f"Steps were counted for {self._counted_for} processes, but {self.num_processes} take different "
                "batches; ask for total_steps after the Accelerator is made, or give `num_processes`."
            )
        if self._num_processes is None and self.num_processes > 1 and not processes_started():
            raise PlanError(
                f"WORLD_SIZE says {self.num_processes} processes, but neither accelerate nor torch.distributed has "
                "started, so that each process would take all batches; start one of them before iterating, or give "
                "`num_processes` and `process_index`."
            )

    def _follow(self, loader: Any) -> None:
        """Take the epoch from a loader of accelerate that begins to draw, and tell it to the collator.

        Raises:
            PlanError: If it would lose batches.
        """
        check_host(loader, self)
        self.check_rows(loader)
        self.set_epoch(loader.iteration)
        if self.first_step and (skipped := skipped_by(loader)):
            raise PlanError(
                f"The sampler resumes at step {self.first_step}, and skip_first_batches would leave out {skipped} "
                "more: iterate the loader itself, whose place was loaded."
            )
        if hasattr(loader.collate_fn, "set_epoch"):
            loader.collate_fn.set_epoch(self.epoch)
        self._loader = weakref.ref(loader)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loader": None}

    def __len__(self) -> int:
        loader = None if self._loader is None else self._loader()
        epoch = self.epoch if loader is None else loader.iteration  # the next one, when its epoch has ended
        steps = self.plan(epoch).num_steps - (self.first_step if epoch == self.epoch else 0)
        return steps if self.process_index is not None else steps * self.num_processes
