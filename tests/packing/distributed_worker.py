"""What each of two processes runs in test_ddp.py: its share of the samples, and the resulting gradients.

Run by `accelerate launch … -m tests.packing.distributed_worker FOLDER FSDP2_CONFIG`. For each of its cases the first
process writes the gradients, and what it ran, to FOLDER.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.tensor import DTensor

from hf_bucketing.losses import global_mean
from hf_bucketing.models import compile_blocks, enable_packing
from hf_bucketing.packing import packed_forward, packed_mse
from tests.models.cases import Samples, make_model

SHARES = ((0, 1, 2, 3), (4, 5))  # another number of samples in each process
CASES = ("ddp", "ddp_checkpointing", "ddp_compiled", "fsdp2", "fsdp2_compiled")


def main() -> None:
    folder, config = map(Path, sys.argv[1:])
    accelerator = Accelerator()
    for case in CASES:
        result = run(case, accelerator, config)
        if accelerator.is_main_process:
            torch.save(result, folder / f"{case}.pt")
    accelerator.wait_for_everyone()
    sys.stderr.flush()
    os._exit(0)  # taking gloo's threads down can deadlock (seen with torch 2.13), and there is nothing to take down


def run(case: str, accelerator: Accelerator, config: Path) -> dict:
    torch._dynamo.utils.counters.clear()
    model = make_model(torch.float64)
    if case.startswith("ddp_"):
        model.enable_gradient_checkpointing()
    if case.endswith("compiled"):
        compile_blocks(model, backend=aot_eager)
    packing = enable_packing(model, strip_length=4)
    model = shard(model, config) if case.startswith("fsdp2") else accelerator.prepare(model)
    samples = Samples(torch.float64, order=SHARES[accelerator.process_index])
    batch = samples.pack(packing)
    values = packed_mse(packed_forward(model, batch), batch.pack_like(samples.targets), batch.layout)
    accelerator.backward(global_mean(values, accelerator=accelerator))
    return {
        "gradients": {
            name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""): full(parameter.grad)
            for name, parameter in model.named_parameters()
        },
        "num_processes": accelerator.num_processes,
        "kinds": {type(module).__name__ for module in model.modules()},
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "sharded": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
    }


def shard(model: torch.nn.Module, config: Path) -> torch.nn.Module:
    """Shard as accelerate does with a config; by itself it does so on accelerators alone, not on CPU processes."""
    settings = {
        name.removeprefix("fsdp_"): value for name, value in yaml.safe_load(config.read_text())["fsdp_config"].items()
    }
    settings["fsdp_version"] = settings.pop("version")
    settings["cpu_offload"] = settings.pop("offload_params")
    plugin = FullyShardedDataParallelPlugin(**settings)
    plugin.set_auto_wrap_policy(model)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", is_main_process=True, parallelism_config=None
    )
    if plugin.activation_checkpointing:
        model = fsdp2_apply_ac(accelerator, model)
    return fsdp2_prepare_model(accelerator, model)


def full(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


if __name__ == "__main__":
    main()
