"""What a run will take, before it starts: memory by a formula, and the largest capacity that fits by trying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import find_executable_batch_size

from ..errors import BucketingError
from ..units import format_bytes

_BYTES_PER_TOKEN_AND_CHANNEL = 34
"""Of one block's activations in half precision, attention scores aside (Korthikanti et al., 2022)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes that one process needs on its device, without text encoder and VAE activations.

    Attributes:
        weights (`int`): The transformer, as it is loaded.
        gradients (`int`): Of what is trained.
        optimizer (`int`): Two moments of what is trained.
        activations (`int`): Of the most expensive step; an estimate to within a factor of two.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        parts = ("weights", "gradients", "optimizer", "activations", "total")
        return ", ".join(f"{name} {format_bytes(getattr(self, name))}" for name in parts)


def model_width(transformer: Any) -> int:
    """Return the channels of a diffusers transformer's tokens."""
    return int(transformer.config.num_attention_heads * transformer.config.attention_head_dim)


def bytes_per_token(transformer: Any) -> int:
    """Return the bytes of activations per token in half precision, without gradient checkpointing."""
    return model_width(transformer) * _BYTES_PER_TOKEN_AND_CHANNEL * _blocks(transformer)


def _blocks(transformer: torch.nn.Module) -> int:
    return sum(len(part) for part in transformer.children() if isinstance(part, torch.nn.ModuleList))


def estimate_memory(
    transformer: Any, *, num_tokens: int, gradient_checkpointing: bool, half_precision: bool, moment_bytes: int = 4
) -> MemoryEstimate:
    """Estimate the memory of training a diffusers transformer.

    Args:
        transformer (`torch.nn.Module`): With blocks in `torch.nn.ModuleList`s and heads in its configuration.
        num_tokens (`int`): Of the most expensive step on one process.
        gradient_checkpointing (`bool`): Whether only the inputs of the blocks are kept.
        half_precision (`bool`): Whether activations take two bytes.
        moment_bytes (`int`): Per number of each of the optimizer's two moments: 4, or 1 for 8-bit optimizers.
    """
    parameters = list(transformer.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    blocks, width = _blocks(transformer), model_width(transformer)
    scale = 1 if half_precision else 2
    block = num_tokens * width * _BYTES_PER_TOKEN_AND_CHANNEL * scale
    activations = block + 2 * scale * num_tokens * width * blocks if gradient_checkpointing else block * blocks
    return MemoryEstimate(
        weights=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        gradients=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        optimizer=2 * moment_bytes * sum(parameter.numel() for parameter in trained),
        activations=activations,
    )


def find_capacity(try_step: Callable[[int], None], *, largest: int, smallest: int) -> int:
    """Return the largest capacity whose most expensive step fits, as accelerate's batch size finder searches.

    Args:
        try_step (callable): Runs the most expensive step of the plan for a capacity, forward and backward; raises
            what torch raises when memory runs out.
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
