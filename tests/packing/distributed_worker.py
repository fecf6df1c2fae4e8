"""What each of two processes runs in test_ddp.py: its share of the samples, and the gradients that come of it.

Run by `accelerate launch … -m tests.packing.distributed_worker OUTPUT [checkpointing] [fsdp2=CONFIG]`; the first
process writes the gradients and what it ran.
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
from torch.distributed.tensor import DTensor

from hf_bucketing.losses import global_mean
from hf_bucketing.models import enable_packing
from hf_bucketing.packing import packed_forward, packed_mse
from tests.packing.packing_cases import Samples, make_model

SHARES = ((0, 1, 2, 3), (4, 5))  # another number of samples in each process


def main() -> None:
    output, *flags = sys.argv[1:]
    accelerator = Accelerator()
    model = make_model(torch.float64)
    if "checkpointing" in flags:
        model.enable_gradient_checkpointing()
    packing = enable_packing(model, strip_length=4)
    config = next((Path(flag.removeprefix("fsdp2=")) for flag in flags if flag.startswith("fsdp2=")), None)
    model = accelerator.prepare(model) if config is None else shard(model, config)
    samples = Samples(torch.float64, order=SHARES[accelerator.process_index])
    batch = samples.pack(packing)
    values = packed_mse(packed_forward(model, batch), batch.pack_like(samples.targets), batch.layout)
    accelerator.backward(global_mean(values, accelerator=accelerator))
    gradients = {
        name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""): full(parameter.grad)
        for name, parameter in model.named_parameters()
    }
    if accelerator.is_main_process:
        kinds = {type(module).__name__ for module in model.modules()}
        sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
        facts = {"num_processes": accelerator.num_processes, "kinds": kinds, "sharded": sharded}
        torch.save({"gradients": gradients, **facts}, output)
    accelerator.wait_for_everyone()
    sys.stderr.flush()
    os._exit(0)  # taking gloo's threads down can deadlock (seen with torch 2.13), and there is nothing to take down


def shard(model: torch.nn.Module, config: Path) -> torch.nn.Module:
    """Shard as accelerate does with a config; by itself it does so on accelerators alone, not on CPU processes."""
    settings = {
        name.removeprefix("fsdp_"): value for name, value in yaml.safe_load(config.read_text())["fsdp_config"].items()
    }
    settings["fsdp_version"] = settings.pop("version")
    settings["cpu_offload"] = settings.pop("offload_params")
    plugin = FullyShardedDataParallelPlugin(**settings)
    plugin.set_auto_wrap_policy(model)
    stand_in = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", is_main_process=True, parallelism_config=None
    )
    if plugin.activation_checkpointing:
        model = fsdp2_apply_ac(stand_in, model)
    return fsdp2_prepare_model(stand_in, model)


def full(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


if __name__ == "__main__":
    main()
