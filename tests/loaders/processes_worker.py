"""Samplers in four real processes, under torch.distributed alone, under accelerate and under its device mesh."""

from __future__ import annotations

import os
from unittest.mock import patch

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, ParallelismConfig, gather_object
from torch import distributed
from torch.utils.data import DataLoader

from hf_bucketing import BucketBatchSampler, PackBatchSampler, PlanError, check_loader, resume
from hf_bucketing.placement.context_parallel import form_groups
from hf_bucketing.plans.packs import PackPlanConfig
from tests.loaders.loader_worker import IDS, TABLE

USABLE = np.flatnonzero(IDS >= 0).tolist()


def sampler_of(**options) -> BucketBatchSampler:
    return BucketBatchSampler(IDS, table=TABLE, batch_size=4, **options)


def loader_of(sampler, **options) -> DataLoader:
    return DataLoader(range(len(IDS)), batch_sampler=sampler, **{"collate_fn": torch.tensor, **options})


def expect(message: str, function, *arguments) -> None:
    with pytest.raises(PlanError, match=message):
        function(*arguments)


def check_plain_ddp() -> None:
    """Each process takes its own batches, whether the sampler was made before the process group or after."""
    early = sampler_of()
    world = int(os.environ["WORLD_SIZE"])
    assert (early.num_processes, early.process_index) == (world, None), "the launcher says it"
    steps = early.total_steps(3)
    expect("so that each process would take all batches", list, early)
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    for sampler in (early, sampler_of(), sampler_of(num_processes=size)):
        assert sampler.total_steps(3) == steps
        assert (sampler.num_processes, sampler.process_index) == (size, rank)
        own = [batch.tolist() for batch in loader_of(sampler)]
        assert own == [batch.tolist() for batch in sampler.plan().batches(process_index=rank)]
        assert len(own) == len(sampler) == sampler.plan().num_steps
    assert not PartialState._shared_state, "accelerate was not asked"
    with patch.dict(os.environ, {"WORLD_SIZE": str(size + 1)}):
        expect("4 by torch.distributed, 5 by the environment's WORLD_SIZE", list, early)
        assert list(sampler) == own, "its number was given"


def check_accelerate() -> None:
    """Under accelerate, exact evaluation; what accelerate would lose is refused by the sampler itself."""
    accelerator = Accelerator()
    sampler = sampler_of(shuffle=False, evaluation=True)
    assert (sampler.num_processes, sampler.process_index) == (accelerator.num_processes, None)
    loader = accelerator.prepare(loader_of(sampler))
    for _ in range(2):
        seen = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
        assert sorted(seen.tolist()) == USABLE
        assert sampler.plan().repeated == -len(USABLE) % accelerator.num_processes > 0
    packs = PackBatchSampler(
        np.where(IDS < 0, 0, 10), config=PackPlanConfig(max_tokens=30, strip_length=1, max_samples=1, evaluation=True)
    )
    prepared = accelerator.prepare(loader_of(packs, collate_fn=list))
    gathered = [accelerator.gather_for_metrics(batch, use_gather_object=True) for batch in prepared]
    assert sorted(row for step in gathered for row in step) == USABLE
    expect("has 9 rows, but the sampler was made for 47", list, accelerator.prepare(
        DataLoader(range(9), batch_sampler=sampler_of())
    ))  # fmt: skip
    dispatching = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    expect("set dispatch_batches=False", list, dispatching.prepare(loader_of(sampler_of())))


def check_mesh(*, by_config: bool) -> None:
    """Processes of one context-parallel group take the same batch; the plan is over the groups.

    The mesh is accelerate's own, or that of a training run under DDP.
    """
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    if by_config:
        with patch.object(ParallelismConfig, "_validate_accelerator"):  # which wants a GPU
            accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2, cp_size=2))
    else:
        accelerator = Accelerator()
        form_groups(accelerator, degree=2)
    for options in ({}, {"num_processes": 2}):
        sampler = sampler_of(**options)
        assert sampler.num_processes == 2
        loader = resume(accelerator, accelerator.prepare(loader_of(sampler)))
        plan = sampler.plan()
        own = [batch.tolist() for batch in loader]
        assert own == [rows.tolist() for rows in plan.batches(process_index=accelerator.process_index // 2)]
        loader.set_epoch(0)
        assert [loader.rows_of_step(step).tolist() for step in range(plan.num_steps)] == own
        together = gather_object([own])
        assert together[0] == together[1] != together[2] == together[3]
    wrong = accelerator.prepare(loader_of(sampler_of(num_processes=4)))
    expect("plans for 4 processes, but its batches are shared among 2", list, wrong)
    expect("plans for 4 processes, but its batches are shared among 2", check_loader, accelerator, wrong)


if __name__ == "__main__":
    check_plain_ddp()
    check_accelerate()
    check_mesh(by_config=True)
    check_mesh(by_config=False)
