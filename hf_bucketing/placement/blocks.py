"""The blocks of a transformer."""

from __future__ import annotations

import torch


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
