"""The blocks of a transformer."""

from __future__ import annotations

import torch


def blocks_of(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks of a diffusers transformer: the members of its own lists, such as `transformer_blocks`."""
    lists = [child for child in transformer.children() if isinstance(child, torch.nn.ModuleList)]
    return [block for blocks in lists for block in blocks]


def block_names(transformer: torch.nn.Module) -> list[str]:
    """Return the classes of what FSDP shards one by one: those that a model names for it, else those of its blocks."""
    named = getattr(transformer, "_no_split_modules", None)
    return list(named or dict.fromkeys(type(block).__name__ for block in blocks_of(transformer)))
