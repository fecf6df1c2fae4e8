"""Refuse settings of accelerate under which planned batches would be lost, split or sharded twice."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch.utils.data import DataLoader

from ..errors import PlanError
from .host import check_host, data_parallel_size, samplers_of
from .planned import PlannedBatchSampler


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
