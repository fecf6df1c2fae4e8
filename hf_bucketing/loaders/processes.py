"""Processes of a run: who of them draws from a batch sampler, and whether all read and write the same."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, SkipBatchSampler
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch import distributed
from torch.utils.data import DataLoader

from ..errors import BucketingError, PlanError


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return the batch sampler of a loader, and inside it those that accelerate wrapped, the innermost last."""
    samplers: list[Any] = [getattr(loader, "batch_sampler", None)]
    while hasattr(samplers[-1], "batch_sampler"):
        samplers.append(samplers[-1].batch_sampler)
    return samplers


def shards_of(loader: DataLoader[Any]) -> int:
    """Return the number of processes among which accelerate shares the batches of a loader."""
    shards = 1
    for sampler in samplers_of(loader):
        shards *= sampler.num_processes if isinstance(sampler, BatchSamplerShard) else 1
    return shards


def skipped_by(loader: DataLoader[Any]) -> int:
    """Return how many batches `skip_first_batches` leaves out of a loader on each process."""
    return sum(sampler.skip_batches for sampler in samplers_of(loader) if isinstance(sampler, SkipBatchSampler))


def current_loader(sampler: Any) -> Any:
    """Return the loader of accelerate that is being iterated, if it draws from a sampler, else None.

    accelerate announces a loader before it draws its first batch. Its `iteration` is the epoch, which `set_epoch` does
    not tell a sampler inside `skip_first_batches` on several processes.
    """
    loader = GradientState().active_dataloader if GradientState._shared_state else None
    return loader if loader is not None and samplers_of(loader)[-1] is sampler else None


def num_sharing() -> int:
    """Return how many processes take different batches.

    accelerate shares batches out among the data-parallel ranks of its device mesh: processes of one tensor- or
    context-parallel group take the same batch. Without accelerate, all processes take different ones.

    Raises:
        PlanError: As [`num_running`].
    """
    running = num_running()
    return data_parallel_size(running) if PartialState._shared_state else running


def group_rank(num_processes: int) -> int | None:
    """Return the rank in the group of torch.distributed; None if it has not started, or with another number."""
    if not _group_started() or distributed.get_world_size() != num_processes:
        return None
    return distributed.get_rank()


def num_running() -> int:
    """Return the number of processes of this run, by accelerate, torch.distributed or the launcher's `WORLD_SIZE`.

    Raises:
        PlanError: If these say different numbers, or `WORLD_SIZE` is not a number.
    """
    numbers: dict[str, int] = {}
    if PartialState._shared_state:
        numbers["accelerate's PartialState"] = PartialState().num_processes
    if _group_started():
        numbers["torch.distributed"] = distributed.get_world_size()
    if launched := os.environ.get("WORLD_SIZE"):
        if not launched.isdecimal():
            raise PlanError(f"The environment's WORLD_SIZE is {launched!r}; expected the number of processes.")
        numbers["the environment's WORLD_SIZE"] = int(launched)
    if len({*numbers.values()}) > 1:
        said = ", ".join(f"{number} by {source}" for source, number in numbers.items())
        raise PlanError(
            f"The number of processes differs: {said}. Start all with `accelerate launch` or `torchrun`, unset "
            "WORLD_SIZE where it belongs to another job, or give `num_processes`."
        )
    return next(iter(numbers.values()), 1)


def process_rank() -> int | None:
    """Return which process this is, by the same and the launcher's `RANK`; None if nothing says it."""
    if PartialState._shared_state:
        return PartialState().process_index
    if _group_started():
        return distributed.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else None


def processes_started() -> bool:
    """Return whether accelerate or torch.distributed has started, so that a process knows its batches."""
    return bool(PartialState._shared_state) or _group_started()


def _group_started() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def data_parallel_size(num_processes: int) -> int:
    """Return among how many of accelerate's processes `accelerator.prepare` shares batches, as it counts them."""
    meshes = AcceleratorState._shared_state
    deepspeed = meshes.get("distributed_type") == DistributedType.DEEPSPEED
    mesh = meshes.get("ds_device_mesh" if deepspeed and "ds_device_mesh" in meshes else "device_mesh")
    if mesh is None:
        return num_processes
    sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names}
    if deepspeed:
        return num_processes // sizes.get("tp", 1)
    return sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)


def check_host(loader: DataLoader[Any], sampler: Any) -> None:
    """Raise if a loader of accelerate would not hand each batch of its planned sampler to one process.

    Raises:
        PlanError: Under `dispatch_batches`, for a data set of another length, or for a loader that is not sharded
            although several processes run, or is sharded twice.
    """
    if isinstance(loader, DataLoaderDispatcher):
        raise PlanError("dispatch_batches joins batches of different sizes; set dispatch_batches=False.")
    rows = len(loader.dataset) if hasattr(loader.dataset, "__len__") else sampler.num_rows
    if rows != sampler.num_rows:
        raise PlanError(
            f"The loader's data set has {rows} rows, but the sampler was made for {sampler.num_rows}; make it from "
            "the columns of the same data set."
        )
    num_processes = sampler.num_processes
    shards = shards_of(loader) * (1 if sampler.process_index is None else num_processes)
    if shards != num_processes:
        raise PlanError(
            f"The sampler plans for {num_processes} processes, but its batches are shared among {shards}: prepare the "
            "loader once, without process_index, and let num_processes be accelerate's."
        )


def check_same(accelerator: Accelerator, values: Mapping[str, str], *, what: str, advice: str) -> None:
    """Raise on every process unless all hold the same values; call it on every process.

    Args:
        accelerator (`Accelerator`): The run's accelerator.
        values (mapping of `str` to `str`): What must be equal, by name.
        what (`str`): What processes may have of their own, such as "rows".
        advice (`str`): What the person can do.

    Raises:
        BucketingError: If the values of a process differ from those of the first.
    """
    if accelerator.num_processes == 1:
        return
    first, *others = gather_object([values])
    for process, other in enumerate(others, 1):
        names = [name for name in first if first[name] != other.get(name)]
        if names:
            differences = ", ".join(f"{name} {first[name]} and {other.get(name)}" for name in names)
            raise BucketingError(
                f"Processes 0 and {process} have different {what}: {differences}. If they are on machines with disks "
                f"of their own, {advice}."
            )


def check_shared(accelerator: Accelerator, folder: Path, *, advice: str) -> None:
    """Raise on every process unless all see the same folder; call it on every process.

    Args:
        accelerator (`Accelerator`): The run's accelerator.
        folder (`Path`): The folder, which the main process makes where it is missing.
        advice (`str`): Why it must be one folder, and what the person can do.

    Raises:
        BucketingError: If a process does not see a file that the main process writes there.
    """
    if accelerator.num_processes == 1:
        return
    trial = folder / broadcast_object_list([f".seen-by-all-{time.time_ns()}"])[0]
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch()
    accelerator.wait_for_everyone()
    seen = gather_object([trial.exists()])
    if accelerator.is_main_process:
        trial.unlink()
    if not all(seen):
        raise BucketingError(
            f"Process {seen.index(False)} does not see what the main process writes to {folder}; {advice}."
        )
