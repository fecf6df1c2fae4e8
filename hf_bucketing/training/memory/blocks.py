"""The blocks of a transformer, and its layout before weights are loaded."""

from __future__ import annotations

from typing import Any

import torch

from ...models import loading
from ...models.registry import recipe_of
from ..config import TrainingConfig


def empty_transformer(config: TrainingConfig) -> Any:
    """Return the transformer that a run trains, from its configuration alone: parameters without values.

    Raises:
        BucketingError: If there is no such transformer.
    """
    name = config.pretrained_model_name_or_path
    recipe_of(name)  # refuses pipelines that cannot be trained
    return loading.empty_transformer(name, config.trained_component)


def blocks_of(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks of a diffusers transformer: the members of its own lists, such as `transformer_blocks`."""
    lists = [child for child in transformer.children() if isinstance(child, torch.nn.ModuleList)]
    return [block for blocks in lists for block in blocks]


def block_names(transformer: torch.nn.Module) -> list[str]:
    """Return the classes of what FSDP shards one by one: those that a model names for it, else those of its blocks."""
    named = getattr(transformer, "_no_split_modules", None)
    return list(named or dict.fromkeys(type(block).__name__ for block in blocks_of(transformer)))
