"""Refuse the accelerate settings under which planned batches would be lost, split or sharded twice."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from torch.utils.data import DataLoader

from ..errors import PlanError
from .planned import PlannedBatchSampler


def check_loader(accelerator: Accelerator, loader: DataLoader[Any]) -> None:
    """Raise if a prepared loader would not yield each planned batch once.

    Args:
        accelerator (`Accelerator`): The one that prepared the loader.
        loader (`DataLoader`): Made with `batch_sampler=` one of this package's samplers.

    Raises:
        PlanError: Under `dispatch_batches` or `split_batches`, for a loader without a planned sampler, for one that
            is not sharded although several processes run, or is sharded twice.
    """
    if accelerator.split_batches:
        raise PlanError("split_batches cuts planned batches apart; leave it out of DataLoaderConfiguration.")
    if isinstance(loader, DataLoaderDispatcher) or accelerator.dispatch_batches:
        raise PlanError("dispatch_batches joins batches of different sizes; set dispatch_batches=False.")
    sampler: Any = loader.batch_sampler
    shards = 1
    while not isinstance(sampler, PlannedBatchSampler) and hasattr(sampler, "batch_sampler"):
        shards *= sampler.num_processes if isinstance(sampler, BatchSamplerShard) else 1
        sampler = sampler.batch_sampler
    if not isinstance(sampler, PlannedBatchSampler):
        raise PlanError(
            f"Expected a DataLoader with batch_sampler=BucketBatchSampler(…) or PackBatchSampler(…), got "
            f"{type(sampler).__name__}."
        )
    sharded = shards if sampler.process_index is None else shards * sampler.num_processes
    if sharded != accelerator.num_processes or sampler.num_processes != accelerator.num_processes:
        raise PlanError(
            f"{accelerator.num_processes} processes run, but the sampler plans for {sampler.num_processes} and its "
            f"batches are shared among {sharded}: prepare the loader once, without process_index, and let "
            "num_processes be accelerate's."
        )
