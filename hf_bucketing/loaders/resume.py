"""Make accelerate's checkpoints hold the place in the data, so that a loaded run continues where the saved one was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from torch.utils.data import DataLoader

from ..buckets.arrays import IntArray
from ..errors import BucketingError, PlanError
from ..plans.epoch import EpochPlan
from ..randomness import Purpose, integer_seed
from .planned import PlannedBatchSampler
from .processes import check_host, current_loader, data_parallel_size, samplers_of
from .state import epoch_number
from .window import AccumulationWindow


def resume(accelerator: Accelerator, loader: DataLoader[Any]) -> ResumableLoader | Any:
    """Put a prepared loader under the care of `accelerator.save_state` and `load_state`.

    Call it once, after `accelerator.prepare` and before `load_state`, and iterate what it returns. From then on every
    checkpoint holds the epoch and the steps that are finished, and loading one continues with the next batch.

    Args:
        accelerator (`Accelerator`): The one that prepared the loader.
        loader (`DataLoader`): Made with `batch_sampler=` one of this package's samplers, and prepared; or that of a
            [`StreamingBucketBatcher`][hf_bucketing.streaming.StreamingBucketBatcher], not prepared.

    Returns:
        [`ResumableLoader`], or for a stream a [`ResumableStream`][hf_bucketing.streaming.ResumableStream]. A data set
        with a method `resumable(accelerator, loader)` decides itself what is returned.

    Raises:
        PlanError: If batches would be lost; see [`check_loader`][hf_bucketing.loaders.check_loader].

    Example:
        ```python
        loader = resume(accelerator, accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, …)))
        if checkpoint is not None:
            accelerator.load_state(checkpoint)
        for epoch in range(loader.epoch, num_epochs):
            loader.set_epoch(epoch)
            for batch in loader:
                with accelerator.accumulate(model):
                    …
                if loader.step % 500 == 0:
                    accelerator.save_state(folder)
        ```
    """
    dataset: Any = loader.dataset
    sources: tuple[Any, ...] = (dataset, getattr(dataset, "dataset", None))  # the second is below accelerate's shard
    for source in sources:
        if hasattr(source, "resumable"):
            return source.resumable(accelerator, loader)
    return ResumableLoader(accelerator, loader)


class ResumableLoader(DataLoaderShard):
    """A prepared loader that knows its place, so that checkpoints hold it.

    In all else it is that loader: each `iter()` yields the whole epoch, or what was left of it when it was loaded, and
    the next epoch follows once an iteration has reached the end. A batch counts as finished once it is handed out, so
    save after its step, not before. What was saved inside a window of gradient accumulation continues at the start of
    that window, with its random states, since checkpoints hold no gradients. No global random number is drawn. Several
    loaders of one accelerator, as for training and validation, each keep their place; one whose sampler has
    `evaluation=True` always starts at the beginning.

    `accelerator.skip_first_batches(loader, n)` gives another loader, whose place no checkpoint can hold.

    Args:
        accelerator (`Accelerator`): See [`resume`].
        loader (`DataLoader`): See [`resume`].

    Raises:
        PlanError: As [`resume`].
    """

    def __init__(self, accelerator: Accelerator, loader: DataLoader[Any]) -> None:
        stateful = getattr(loader, "use_stateful_dataloader", False)
        if stateful:
            # Its own state counts what was drawn, all processes write it to one file, and prepare() has begun to draw.
            loader.use_stateful_dataloader = False
        check_loader(accelerator, loader)
        if not isinstance(loader, DataLoaderShard):
            raise PlanError("Only a prepared loader can be resumed: pass what accelerator.prepare(loader) returns.")
        self.__dict__.update(loader.__dict__)
        self.accelerator = accelerator
        self.sampler: PlannedBatchSampler = planned_sampler(loader)
        self.step = self.sampler.first_step
        self._drew_ahead = stateful
        self._window = AccumulationWindow(accelerator, self.step)
        self._generator: torch.Generator | None = None
        if self.base_dataloader.generator is None:
            # An iterator draws a seed for its workers; from torch's own state, a resumed run would draw once more.
            self._generator = self.base_dataloader.generator = torch.Generator()
        accelerator.register_for_checkpointing(self)

    @property
    def epoch(self) -> int:
        """The epoch that is iterated next, or at present."""
        return self.sampler.epoch

    @property
    def plan(self) -> EpochPlan:
        """The plan whose steps `step` counts."""
        return self.sampler.plan()

    @property
    def samples_in_window(self) -> int:
        """How many samples [`rows_in_window`][ResumableLoader.rows_in_window] holds."""
        return len(self.rows_in_window)

    @property
    def rows_in_window(self) -> IntArray:
        """Rows that all processes take together in the accumulation window of the batch at hand.

        Their number, or what they weigh together, is the `total` of [`global_mean`][hf_bucketing.losses.global_mean].
        """
        return self.plan.rows_in_steps(
            self._window.start, self._window.start + self.accelerator.gradient_accumulation_steps
        )

    def rows_of_step(self, step: int) -> IntArray:
        """Return the rows that this process takes in a step of `plan`."""
        shards = [outer for outer in samplers_of(self) if isinstance(outer, BatchSamplerShard)]
        process = shards[0].process_index if shards else self.sampler.process_index or 0
        return self.plan.batch(step * self.plan.num_processes + process)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate, from its start; the present one again changes nothing.

        Raises:
            PlanError: If it is no whole number from 0.
        """
        epoch = epoch_number(epoch)
        if epoch != self.epoch:
            self.step = self._window.start = 0
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(self.epoch)
        if self._drew_ahead:
            self.base_dataloader.load_state_dict({})
            self._drew_ahead = False
        if self._generator is not None:
            self._generator.manual_seed(integer_seed(Purpose.LOADER, self.sampler.config.seed, self.epoch))
        self.step = self._window.start = self.sampler.first_step
        for batch in self._batches():
            self._window.enter(self.step)
            self.step += 1
            yield batch
        self.set_epoch(self.epoch + 1)

    def _batches(self) -> Iterator[Any]:
        """Yield the loader's batches; say which process, step and rows it was when a worker dies or hangs."""
        try:
            yield from super().__iter__()
        except RuntimeError as error:
            if "DataLoader" not in str(error):
                raise
            process = self.accelerator.process_index
            # accelerate draws one batch ahead of the one at hand.
            ahead = range(self.step, min(self.step + 2, self.plan.num_steps))
            rows = [self.rows_of_step(step).tolist() for step in ahead]
            happened = str(error).rstrip(".")
            raise BucketingError(
                f"Process {process} got no batch after step {self.step} of epoch {self.epoch}: {happened}. The worker "
                f"was to load the rows {' or '.join(map(str, rows))}, or ones a few steps later. Look for a sample "
                "that takes all memory or hangs, raise the loader's `timeout`, or lower `num_workers`."
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return the place as JSON values, the same on every process; see `PlannedBatchSampler.state_dict`.

        Raises:
            PlanError: If another loader, such as that of `skip_first_batches`, draws from the same sampler.
        """
        if current_loader(self.sampler) not in (None, self):
            raise PlanError(
                "A checkpoint cannot hold the place of skip_first_batches: iterate the loader that resume() returned, "
                "which load_state puts in its place."
            )
        step = 0 if self.sampler.config.evaluation else self._window.resume_from(self.step)
        return self.sampler.state_dict(step=step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, on any number of processes.

        Raises:
            PlanError: If the rows, the table, the settings or the seed differ.
        """
        self.sampler.load_state_dict(state)
        self.iteration, self.step = self.epoch, self.sampler.first_step
        self._window.restore(self.step)


def check_loader(accelerator: Accelerator | None, loader: DataLoader[Any]) -> None:
    """Raise if a loader would not yield each planned batch once, or would resume in the wrong place.

    A loader of accelerate is also checked whenever it is iterated. A plain `DataLoader` tells its sampler nothing, not
    even how many rows it has: check it here once.

    Args:
        accelerator (`Accelerator`, *optional*): Accelerator that prepared the loader; None without accelerate.
        loader (`DataLoader`): Loader whose `batch_sampler` is one of this package's samplers.

    Raises:
        PlanError: Under `dispatch_batches`, `split_batches` or, without [`resume`][hf_bucketing.loaders.resume],
            `use_stateful_dataloader`; for a loader without a planned sampler, whose sampler has a `batch_size`, or
            whose data set has another length, or other numbers in the column that the sampler was made from; for one
            not sharded although several processes run, or sharded twice.
    """
    if accelerator is not None:
        _check_settings(accelerator)
    if getattr(loader, "use_stateful_dataloader", False):
        raise PlanError(
            "use_stateful_dataloader starts drawing the first epoch in prepare(), saves what was drawn instead of "
            "what was trained on, and all processes write one file; iterate resume(accelerator, loader), which saves "
            "the right place in save_state, or leave use_stateful_dataloader out."
        )
    sampler = planned_sampler(loader)
    batch_size = getattr(sampler, "batch_size", None)
    if batch_size is not None:
        raise PlanError(
            f"The sampler has batch_size={batch_size}, by which accelerate drops each group of batches that "
            "holds a shorter one, up to 92 % of the data; delete the attribute."
        )
    planned = sampler.num_processes
    check_host(loader, sampler)
    sampler.check_rows(loader)
    running = planned if accelerator is None else data_parallel_size(accelerator.num_processes)
    if planned != running:
        raise PlanError(
            f"{running} processes take different batches, but the sampler plans for {planned}; let num_processes be "
            "accelerate's."
        )


def _check_settings(accelerator: Accelerator) -> None:
    if accelerator.split_batches:
        raise PlanError("split_batches cuts planned batches apart; leave it out of DataLoaderConfiguration.")
    if accelerator.dispatch_batches:
        raise PlanError("dispatch_batches joins batches of different sizes; set dispatch_batches=False.")


def planned_sampler(loader: DataLoader[Any]) -> PlannedBatchSampler:
    """Return the planned sampler of a loader, inside the wrappers of accelerate.

    Raises:
        PlanError: If the loader has none.
    """
    sampler = samplers_of(loader)[-1]
    if not isinstance(sampler, PlannedBatchSampler):
        raise PlanError(
            f"Expected a DataLoader with batch_sampler=BucketBatchSampler(…) or PackBatchSampler(…), got "
            f"{type(sampler).__name__}."
        )
    return sampler
