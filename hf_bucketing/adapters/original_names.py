"""Layers of a model's original checkpoint, which other programs name, and the modules that diffusers makes of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..models.registry import family_of
from ..placement.sharding import name_in_files

_PREFIX = re.compile(
    r"(base_model\.model\.)?((model\.)?diffusion_model\.|transformer\.|lora_unet__?|lora_transformer_)?"
)
"""What programs write in front of a layer's name."""


def original_layers(transformer: Any) -> dict[str, dict[str, int]]:
    """Return the layers of the original checkpoint that a model's family names.

    Args:
        transformer (`torch.nn.Module`): A transformer of diffusers, also without values, or with adapters.

    Returns:
        `dict` of `str` to `dict`: For each layer, by its original name, the modules of diffusers that hold its rows,
        in their order, and how many rows each has. A layer of several modules is fused.
    """
    layers: dict[str, dict[str, int]] = {}
    sizes = _linear_modules(transformer)
    for pattern, original in family_of(transformer).original_names or ():
        expression = re.compile(re.escape(pattern).replace(r"\*\*", "(.+)").replace(r"\*", r"(\d+)"))
        for module, rows in sizes.items():
            if match := expression.fullmatch(module):
                parts = iter(match.groups())
                name = re.sub(r"\*+", lambda _, parts=parts: next(parts), original)  # type: ignore[misc]
                layers.setdefault(name, {})[module] = rows
    return layers


def known_layers(transformer: Any) -> dict[str, Mapping[str, int]]:
    """Return the layers that files may name, as in [`original_layers`], by each of their names without a prefix.

    These are diffusers' and the original ones, with dots, and with `_` in their place as kohya's trainers write them.
    """
    modules = {module: {module: rows} for module, rows in _linear_modules(transformer).items()}
    named: dict[str, Mapping[str, int]] = {**original_layers(transformer), **modules}
    return {**{name.replace(".", "_"): parts for name, parts in named.items()}, **named}


def without_prefix(name: str) -> str:
    """Return a layer's name without the prefix that a program wrote in front of it.

    Example:
        >>> without_prefix("lora_unet_blocks_0_self_attn_q"), without_prefix("diffusion_model.blocks.0.self_attn.q")
        ('blocks_0_self_attn_q', 'blocks.0.self_attn.q')
    """
    return _PREFIX.sub("", name, count=1)


def _linear_modules(transformer: Any) -> dict[str, int]:
    """Return the output channels of each linear module by its name in files."""
    return {
        name_in_files(name).removesuffix(".base_layer"): module.out_features
        for name, module in transformer.named_modules()
        if hasattr(module, "out_features") and ".lora_" not in name
    }
