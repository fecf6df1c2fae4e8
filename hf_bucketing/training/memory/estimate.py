"""Memory of a run: an estimate before it starts, the most tokens that fit, and advice when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size

from ...buckets.sizes import LatentSpec, Size
from ...buckets.table import BucketTable
from ...errors import BucketingError
from ...models.recipe import Recipe
from ...settings import changed
from ...units import format_bytes
from ..config import TrainingConfig
from ..data import TrainingData, make_data
from ..steps import Step

_BYTES_PER_TOKEN_AND_CHANNEL = 34
"""Activations of one block in half precision, without attention scores (Korthikanti et al., 2022)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes that one process needs on its device, without the activations of text encoder and VAE.

    Attributes:
        weights (`int`): Weights of the transformer, as loaded.
        gradients (`int`): Gradients of the trained weights.
        optimizer (`int`): Two moments of the trained weights.
        activations (`int`): Activations of the most expensive step, to within a factor of two.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = {**asdict(self), "total": self.total}
        return ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())


def model_width(transformer: Any) -> int:
    """Return the number of channels of a diffusers transformer's tokens."""
    return int(transformer.config.num_attention_heads * transformer.config.attention_head_dim)


def bytes_per_token(transformer: Any) -> int:
    """Return the bytes of activations per token in half precision, without gradient checkpointing."""
    return model_width(transformer) * _BYTES_PER_TOKEN_AND_CHANNEL * _num_blocks(transformer)


def _num_blocks(transformer: torch.nn.Module) -> int:
    return sum(len(part) for part in transformer.children() if isinstance(part, torch.nn.ModuleList))


def estimate_memory(
    transformer: Any, *, num_tokens: int, gradient_checkpointing: bool, half_precision: bool, moment_bytes: int = 4
) -> MemoryEstimate:
    """Estimate the memory of training a diffusers transformer.

    Args:
        transformer (`torch.nn.Module`): Transformer with its blocks in `torch.nn.ModuleList`s and its number of heads
            in its configuration.
        num_tokens (`int`): Tokens of the most expensive step on one process.
        gradient_checkpointing (`bool`): Whether only the inputs of the blocks are kept.
        half_precision (`bool`): Whether activations take two bytes rather than four.
        moment_bytes (`int`): Bytes per number of each of the optimizer's two moments: 4, or 1 for 8-bit optimizers.
    """
    parameters = list(transformer.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    blocks, width = _num_blocks(transformer), model_width(transformer)
    scale = 1 if half_precision else 2
    block = num_tokens * width * _BYTES_PER_TOKEN_AND_CHANNEL * scale
    activations = block + 2 * scale * num_tokens * width * blocks if gradient_checkpointing else block * blocks
    return MemoryEstimate(
        weights=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        gradients=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        optimizer=2 * moment_bytes * sum(parameter.numel() for parameter in trained),
        activations=activations,
    )


def describe(
    config: TrainingConfig,
    data: TrainingData,
    *,
    transformer: torch.nn.Module,
    accelerator: Accelerator,
    max_train_steps: int,
) -> list[str]:
    """Return the plan of the first epoch, its cost and an estimate of memory, as lines of text."""
    plan, batches, epoch = data.sampler.plan(), config.batches, data.sampler.epoch
    if not plan.num_steps:  # resumed on another number of processes at the end of an epoch
        epoch += 1
        plan = data.sampler.plan(epoch)
    of_samples = data.tokens_of(plan.indices, epoch=epoch)
    tokens = np.add.reduceat(of_samples, plan.offsets[:-1])
    costs = data.cost_model.pack_cost(of_samples, plan.offsets).reshape(plan.num_steps, -1)
    degree = config.memory.context_parallel_degree
    memory = estimate_memory(
        transformer,
        num_tokens=-(-int(tokens.max()) // degree),
        gradient_checkpointing=config.memory.gradient_checkpointing,
        half_precision=accelerator.mixed_precision != "no",
        moment_bytes=config.optimizer.moment_bytes,
    )
    mixed = f", {plan.num_mixed_steps} of them mixed" if batches.batching == "bucket" else ""
    dropped = ", ".join(f"{count} {reason}" for reason, count in plan.drop_reasons.items()) or "none"
    limit = batches.token_limit
    fill = "" if limit is None else f", {tokens.mean() / limit:.1%} of {limit} filled"
    groups = f", in groups of {degree} that share their samples" if degree > 1 else ""
    return [
        "***** Running training *****",
        f"  Num processes = {accelerator.num_processes}{groups}",
        f"  Batching = {batches.batching}, mixed precision = {accelerator.mixed_precision}",
        f"  Samples per epoch = {plan.kept} kept, {plan.repeated} repeated, dropped: {dropped}",
        f"  Steps per epoch = {plan.num_steps} on each process{mixed}",
        f"  Tokens per step and process = {tokens.mean():.0f} on average, {tokens.max()} at most{fill}",
        f"  Efficiency over processes = {costs.mean(1).sum() / costs.max(1).sum():.1%} (mean ÷ largest cost)",
        f"  Optimizer steps = {max_train_steps}",
        f"  Memory estimate per process = {memory}",
    ]


def find_max_tokens(try_step: Callable[[int], None], *, largest: int, smallest: int) -> int:
    """Return the largest `max_tokens` whose most expensive step fits, as accelerate's batch size finder searches.

    Args:
        try_step (callable): Function that runs that step for a number of tokens, and raises what torch raises when
            memory runs out.
        largest (`int`): Tokens to start from; each failure takes off a tenth.
        smallest (`int`): Tokens of the largest sample, below which no plan exists.

    Raises:
        BucketingError: If not even `smallest` fits.
    """

    @find_executable_batch_size(starting_batch_size=largest)
    def search(batch_size: int) -> int:
        if batch_size < smallest:
            raise BucketingError(
                f"The largest sample takes {smallest} tokens, and a step of {batch_size} is the most that could fit. "
                'Use smaller sizes, `gradient_checkpointing=True`, `mixed_precision="bf16"` or `lora_rank=16`.'
            )
        try_step(batch_size)
        return batch_size

    found: int = search()
    return found


def fill_max_tokens(
    config: TrainingConfig, spec: LatentSpec, *, accelerator: Accelerator, step: Step
) -> TrainingConfig:
    """Return the settings with `max_tokens="auto"` replaced by the largest number of tokens that fits in memory.

    The most expensive step of the plan is run forward and backward on random media, with an optimizer that changes
    nothing, on each process; the smallest result counts.

    Raises:
        BucketingError: If not even the largest sample fits.
    """
    if config.batches.max_tokens != "auto":
        return config
    searched = changed(config, random_resize=None)  # samples at their own size are the largest that are drawn
    transformer = step.recipe.transformer
    width = model_width(transformer)
    transformer.to(accelerator.device)
    tokens = make_data(changed(searched, max_tokens=2**40), spec, width=width).num_tokens
    strip_length = config.batches.strip_length
    smallest = int(-(-tokens.max() // strip_length) * strip_length)
    share = -(-int(tokens.sum()) // accelerator.num_processes)
    largest = min(share, 2 * _free_bytes(accelerator) // bytes_per_token(transformer))

    def try_step(max_tokens: int) -> None:
        data = make_data(changed(searched, max_tokens=max_tokens), spec, width=width)
        plan = data.sampler.plan(0)
        costs = data.cost_model.pack_cost(data.num_tokens[plan.indices], plan.offsets)
        sizes = data.sizes(plan.batch(int(costs.argmax())))
        trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.0)
        step.empty_text = data.empty_text
        with accelerator.autocast():
            losses = step(transformer, _random_batch(sizes, step.recipe, accelerator.device, data=data), epoch=0)
        losses.values.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = torch.tensor(find_max_tokens(try_step, largest=max(largest, smallest), smallest=smallest))
    max_tokens = int(accelerator.gather(found.to(accelerator.device)[None]).min())
    accelerator.print(f"--max_tokens auto found {max_tokens} tokens per process and step")
    return changed(config, max_tokens=max_tokens)


def out_of_memory(error: Exception, batch: Mapping[str, Any], config: TrainingConfig) -> str | None:
    """Return what to do if an error says that memory ran out while training on a batch; None for other errors."""
    if not (isinstance(error, MemoryError) or should_reduce_batch_size(error)):
        return None
    sizes = ", ".join("x".join(map(str, size)) for size in batch["size"])
    less = "`max_tokens`" if config.batches.max_tokens is not None else "`train_batch_size`"
    helps = [f"lower {less}"]
    helps += [] if config.memory.gradient_checkpointing else ["use `gradient_checkpointing=True`"]
    helps += ['use `max_tokens="auto"` to find what fits', "or train adapters with `lora_rank=16`"]
    return (
        f"Memory ran out on {len(batch['size'])} samples (frames x height x width: {sizes}; index "
        f"{list(batch['index'])}): {', '.join(helps)}. {str(error).splitlines()[0]}"
    )


def _free_bytes(accelerator: Accelerator) -> int:
    if accelerator.device.type == "cuda":
        return int(torch.cuda.mem_get_info(accelerator.device)[0])
    return int(psutil.virtual_memory().available) // accelerator.num_processes


def _random_batch(sizes: list[Size], recipe: Recipe, device: torch.device, *, data: TrainingData) -> dict[str, Any]:
    """Return a batch of the run's kind with random media or, where the run reads a cache, random latents."""
    batch: dict[str, Any] = {
        "caption": [""] * len(sizes),
        "index": list(range(len(sizes))),
        "fps": [0.0] * len(sizes),
        "size": sizes,
    }
    transformer, family = recipe.transformer, recipe.family
    if recipe.modules("vae"):
        name, media = "pixel_values", [torch.rand(3, *size, device=device) * 2 - 1 for size in sizes]
    else:
        channels = family.in_channels(transformer)
        name, media = (
            "latents",
            [torch.randn(channels, *recipe.spec.latent_size(size), device=device) for size in sizes],
        )
    batch[name] = torch.stack(media) if isinstance(data.table, BucketTable) else media
    if not recipe.modules("text_encoders"):
        shape = len(sizes), recipe.max_sequence_length
        batch["text_values"] = torch.randn(*shape, family.text_dim(transformer), device=device)
        batch["text_mask"] = torch.ones(shape, device=device) if family.text_rule == "masked" else None
    return batch
