"""What a run will take: its plan and memory as text, the largest capacity that fits, and what to do when none does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size

from ..buckets.sizes import LatentSpec, Size
from .config import TrainingConfig
from .data import TrainingData, make_data
from .estimate import bytes_per_token, estimate_memory, find_capacity, model_width
from .steps import Step


def describe(
    config: TrainingConfig,
    data: TrainingData,
    *,
    transformer: torch.nn.Module,
    accelerator: Accelerator,
    max_train_steps: int,
) -> list[str]:
    """Return the plan of the first epoch, its cost and an estimate of memory, as lines of text."""
    plan = data.sampler.plan()
    of_samples = data.tokens_of(plan.indices, epoch=data.sampler.epoch)
    tokens = np.add.reduceat(of_samples, plan.offsets[:-1])
    costs = data.cost_model.pack_cost(of_samples, plan.offsets).reshape(plan.num_steps, -1)
    memory = estimate_memory(
        transformer,
        num_tokens=int(tokens.max()),
        gradient_checkpointing=config.gradient_checkpointing,
        half_precision=accelerator.mixed_precision != "no",
        moment_bytes=1 if config.optimizer == "adamw_8bit" else 4,
    )
    mixed = f", {plan.num_mixed_steps} of them mixed" if config.batching == "bucket" else ""
    dropped = ", ".join(f"{count} {reason}" for reason, count in plan.drop_reasons.items()) or "none"
    capacity = config.capacity_tokens
    fill = "" if capacity is None else f", {tokens.mean() / capacity:.1%} of the capacity filled"
    return [
        "***** Running training *****",
        f"  Num processes = {accelerator.num_processes}",
        f"  Batching = {config.batching}, mixed precision = {accelerator.mixed_precision}",
        f"  Samples per epoch = {plan.kept} kept, {plan.repeated} repeated, dropped: {dropped}",
        f"  Steps per epoch = {plan.num_steps} on each process{mixed}",
        f"  Tokens per step and process = {tokens.mean():.0f} on average, {tokens.max()} at most{fill}",
        f"  Efficiency over processes = {costs.mean(1).sum() / costs.max(1).sum():.1%} (mean ÷ largest cost)",
        f"  Optimizer steps = {max_train_steps}",
        f"  Memory estimate per process = {memory}",
    ]


def fill_capacity(config: TrainingConfig, spec: LatentSpec, *, accelerator: Accelerator, step: Step) -> TrainingConfig:
    """Return the settings with `capacity="auto"` replaced by the largest number of tokens that fits in memory.

    The most expensive step of the plan is run forward and backward on random media, with an optimizer that changes
    nothing, on each process; the smallest result counts.

    Raises:
        BucketingError: If not even the largest sample fits.
    """
    if config.capacity != "auto":
        return config
    searched = dataclasses.replace(config, random_resize=None)  # whose sizes are the largest that are drawn
    recipe = step.recipe
    width = model_width(recipe.transformer)
    recipe.transformer.to(accelerator.device)
    tokens = make_data(dataclasses.replace(searched, capacity=str(2**40)), spec, width=width).num_tokens
    smallest = int(-(-tokens.max() // config.strip_length) * config.strip_length)
    share = -(-int(tokens.sum()) // accelerator.num_processes)
    largest = min(share, 2 * _free_bytes(accelerator) // bytes_per_token(recipe.transformer))

    def try_step(capacity: int) -> None:
        data = make_data(dataclasses.replace(searched, capacity=str(capacity)), spec, width=width)
        plan = data.sampler.plan(0)
        costs = data.cost_model.pack_cost(data.num_tokens[plan.indices], plan.offsets)
        sizes = data.sizes(plan.batch(int(costs.argmax())))
        optimizer = torch.optim.AdamW(_trained(recipe.transformer), lr=0.0)
        with accelerator.autocast():
            losses = step(recipe.transformer, _random_batch(sizes, config, accelerator), epoch=0)
        losses.values.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = torch.tensor(find_capacity(try_step, largest=max(largest, smallest), smallest=smallest))
    capacity = int(accelerator.gather(found.to(accelerator.device)[None]).min())
    accelerator.print(f"--capacity auto found {capacity} tokens per process and step")
    return dataclasses.replace(config, capacity=str(capacity))


def out_of_memory(error: Exception, batch: Mapping[str, Any], config: TrainingConfig) -> str | None:
    """Return what to do if an error says that memory ran out while a batch was trained on; else None."""
    if not (isinstance(error, MemoryError) or should_reduce_batch_size(error)):
        return None
    sizes = ", ".join("x".join(map(str, size)) for size in batch["size"])
    less = "`capacity`" if config.capacity is not None else "`train_batch_size`"
    helps = [f"lower {less}"]
    helps += [] if config.gradient_checkpointing else ["use `gradient_checkpointing=True`"]
    helps += ['use `capacity="auto"` to find what fits', "or train adapters with `lora_rank=16`"]
    return (
        f"Memory ran out on {len(batch['size'])} samples (frames x height x width: {sizes}; index "
        f"{list(batch['index'])}): {', '.join(helps)}. {str(error).splitlines()[0]}"
    )


def _trained(transformer: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in transformer.parameters() if parameter.requires_grad]


def _free_bytes(accelerator: Accelerator) -> int:
    if accelerator.device.type == "cuda":
        return int(torch.cuda.mem_get_info(accelerator.device)[0])
    return int(psutil.virtual_memory().available) // accelerator.num_processes


def _random_batch(sizes: list[Size], config: TrainingConfig, accelerator: Accelerator) -> dict[str, Any]:
    pixels = [torch.rand(3, *size, device=accelerator.device) * 2 - 1 for size in sizes]
    return {
        "pixel_values": torch.stack(pixels) if config.batching == "bucket" else pixels,
        "caption": [""] * len(sizes),
        "index": list(range(len(sizes))),
        "fps": [0.0] * len(sizes),
        "size": sizes,
    }
