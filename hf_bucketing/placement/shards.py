"""Tensors of which each process holds a part: whole ones from parts, and parts from whole ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from diffusers.training_utils import EMAModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)
"""Distributed types in which no process holds all weights."""


AVERAGES = "averaged_weights.safetensors"
"""File of a checkpoint with the averages of sharded weights, by their number."""


def name_in_files(name: str) -> str:
    """Return the name of a weight or a module in files, which does not show FSDP's activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of a module by their names in files."""
    for name, parameter in module.named_parameters():
        yield name_in_files(name), parameter


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor whole and on the CPU in the main process, empty in others; call it on every process.

    Tensors that are whole already are returned as they are.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    sharded: Any = tensor.detach().to(tensor.device_mesh.device_type)
    full: torch.Tensor = sharded.full_tensor()
    return full.cpu() if PartialState().is_main_process else full.new_empty(0, device="cpu")


@torch.no_grad()
def copy_full(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a whole tensor, which every process has, to `target`, of which each may hold a part."""
    if isinstance(target, DTensor):
        full = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(full)


def averaged(weights: Sequence[torch.nn.Parameter], *, decay: float, accelerator: Accelerator) -> EMAModel:
    """Return the moving average of weights, in float32, and make accelerate's checkpoints hold it."""
    kind = _ShardedEMAModel if accelerator.distributed_type in SHARDED else EMAModel
    average = kind(weights, decay=decay)
    average.to(dtype=torch.float32)  # in bf16, small changes of an average are lost
    accelerator.register_for_checkpointing(average)
    if isinstance(average, _ShardedEMAModel):
        accelerator.register_save_state_pre_hook(average.save)
        accelerator.register_load_state_pre_hook(average.load)
    return average


class _ShardedEMAModel(EMAModel):
    """Averaged weights of which each process holds its part, and a file of a checkpoint the whole.

    Averaging goes part by part, without communication. Of the file, a process reads one tensor at a time.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the averages."""
        return {**super().state_dict(), "shadow_params": None}

    def save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        """Write the averages; called on every process."""
        tensors = {str(index): gather(average) for index, average in enumerate(self.shadow_params)}
        if PartialState().is_main_process:
            save_file(tensors, Path(folder) / AVERAGES)

    def load(self, models: list[Any], folder: str) -> None:
        """Read the averages; called on every process."""
        with safe_open(Path(folder) / AVERAGES, framework="pt") as tensors:
            for index, average in enumerate(self.shadow_params):
                copy_full(average, tensors.get_tensor(str(index)))
