"""The blocks of a transformer, and gradient checkpointing of some or all of them, for less memory and more time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

from ..errors import BucketingError
from ..packing.context import WithLayout


def blocks_of(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks of a diffusers transformer: the members of its own lists, such as `transformer_blocks`.

    Where the model names the classes of its blocks, others are none, such as the face blocks of Wan-Animate, which run
    between blocks and which gradient checkpointing does not compute again.
    """
    members = members_of_lists(transformer)
    names = {*_named(transformer, "_no_split_modules"), *_named(transformer, "_repeated_blocks")}
    named = [member for member in members if any(cls.__name__ in names for cls in type(member).__mro__)]
    return named or members


def members_of_lists(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the members of a transformer's own lists: its blocks, and what may run between them."""
    lists = [child for child in transformer.children() if isinstance(child, torch.nn.ModuleList)]
    return [member for members in lists for member in members]


def block_names(transformer: torch.nn.Module) -> list[str]:
    """Return the classes of what FSDP shards one by one: those that a model names for it, else those of its blocks."""
    named = _named(transformer, "_no_split_modules")
    return named or list(dict.fromkeys(type(block).__name__ for block in blocks_of(transformer)))


def _named(transformer: torch.nn.Module, attribute: str) -> list[str]:
    return list(getattr(transformer, attribute, None) or ())


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
