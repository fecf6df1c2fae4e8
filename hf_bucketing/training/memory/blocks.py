"""The blocks of a transformer, and its layout before any weight is loaded."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.configuration_utils import ConfigMixin

from ...hub import from_hub


class _AnyModel(ConfigMixin):
    config_name = "config.json"


def read_transformer(name_or_path: str, *, component: str = "transformer") -> Any:
    """Return a transformer of a pipeline on the `meta` device: from its configuration, without weights.

    Raises:
        BucketingError: If there is no such pipeline.
    """
    with from_hub(name_or_path):
        config = _AnyModel.load_config(name_or_path, subfolder=component)
    with torch.device("meta"):
        return getattr(diffusers, config["_class_name"]).from_config(config)


def blocks_of(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks of a diffusers transformer: the members of its own lists, such as `transformer_blocks`."""
    lists = [child for child in transformer.children() if isinstance(child, torch.nn.ModuleList)]
    return [block for blocks in lists for block in blocks]
