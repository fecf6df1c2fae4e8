"""Gradient checkpointing of all blocks of a transformer, or of some: each further one takes less memory, more time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

from ..errors import BucketingError
from ..packing.context import WithLayout
from .blocks import blocks_of


def checkpoint_blocks(transformer: Any, blocks: bool | int) -> None:
    """Make the backward pass compute blocks of a transformer again, whose activations are not kept.

    Args:
        transformer (`ModelMixin`): Transformer of diffusers.
        blocks (`bool` or `int`): True for all blocks, False for none, or how many, see [`spread_blocks`].

    Raises:
        BucketingError: If the transformer has fewer blocks.
    """
    if blocks is False:
        return
    if blocks is True:
        transformer.enable_gradient_checkpointing()
    else:
        transformer.enable_gradient_checkpointing(_SomeBlocks(spread_blocks(transformer, blocks)))


def spread_blocks(transformer: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """Return `count` of the blocks of a transformer, spread evenly.

    Of eight blocks, three are the first, the third and the sixth.

    Raises:
        BucketingError: If the transformer has fewer blocks.
    """
    blocks = blocks_of(transformer)
    check_checkpoints(count, blocks=len(blocks))
    return [blocks[index * len(blocks) // count] for index in range(count)]


def check_checkpoints(count: int, *, blocks: int) -> None:
    """Raise BucketingError if more blocks are to be checkpointed than a model has."""
    if count > blocks:
        raise BucketingError(
            f"`gradient_checkpointing={count}` is more than the {blocks} blocks of this model; use "
            "`gradient_checkpointing=True` for all of them."
        )


class _SomeBlocks:
    """A checkpoint function as models of diffusers call it, which computes all but some blocks as without it."""

    def __init__(self, blocks: list[torch.nn.Module]) -> None:
        self.blocks = frozenset(blocks)

    def __call__(self, block: Callable[..., Any], *args: Any) -> Any:
        if _module_of(block) in self.blocks:
            return checkpoint(block, *args, use_reentrant=False)
        return block(*args)


def _module_of(block: Callable[..., Any]) -> Any:
    """Return the module of a call that [`bind_checkpoints`][hf_bucketing.packing.context] or FSDP wrapped."""
    while True:
        if isinstance(block, WithLayout):
            block = block.block
        elif isinstance(block, partial):
            block = block.func
        elif isinstance(block, FullyShardedDataParallel):
            block = block.module
        else:
            return block
