"""Tensors of which each process holds a part: whole ones from parts, and parts from whole ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from diffusers.training_utils import EMAModel
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.serialization import config as serialization

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)
"""Distributed types in which no process holds all weights."""


_WRAPPER = "_checkpoint_wrapped_module."


def named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of a module by their names in its files, which do not name FSDP's checkpointing."""
    for name, parameter in module.named_parameters():
        yield name.replace(_WRAPPER, ""), parameter


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor whole and on the CPU in the main process, empty in others; call it on every process.

    Tensors that are whole already are returned as they are.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    sharded: Any = tensor.detach().to(tensor.device_mesh.device_type)
    whole: torch.Tensor = sharded.full_tensor()
    return whole.cpu() if PartialState().is_main_process else whole.new_empty(0, device="cpu")


@torch.no_grad()
def copy_whole(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor, which every process has, to `target`, of which each may hold a part."""
    if isinstance(target, DTensor):
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(whole)


class ShardedEMAModel(EMAModel):
    """Averaged weights of which each process holds its part, and checkpoints hold the whole.

    Averaging is done part by part, without communication.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with whole tensors in the main process, which writes it; call it on every process."""
        return {**super().state_dict(), "shadow_params": [gather(average) for average in self.shadow_params]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state with whole tensors."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "shadow_params"})
        for average, whole in zip(self.shadow_params, state_dict["shadow_params"], strict=True):
            copy_whole(average, whole)


@contextmanager
def loading_parts(accelerator: Accelerator) -> Iterator[None]:
    """Where weights are sharded, map files that torch reads in a `with` block: a process then reads only its parts."""
    reading: Any = serialization
    with reading.patch("load.mmap", True) if accelerator.distributed_type in SHARDED else nullcontext():
        yield
