"""Compile the blocks of a transformer, so that packs and buckets of ever new composition share a few graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental._config as shape_settings
from torch.utils._pytree import tree_leaves

from ..errors import BucketingError
from ..packing.attachment import unwrap

GRAPHS_OF_A_BLOCK = 32
"""Graphs of a kind of block that torch may compile; by default 8."""


def compile_blocks(transformer: torch.nn.Module, **options: Any) -> list[str]:
    """Compile the blocks of a diffusers transformer in place, by its `compile_repeated_blocks`.

    The graphs of the first batch serve batches of all other sizes. Compile after adapters were added and packing was
    enabled. What a compiled model computes differs from the model itself by rounding alone.

    Args:
        transformer (`torch.nn.Module`): A diffusers transformer, bare or wrapped.
        options: Further arguments of `torch.compile`, such as `mode`.

    Returns:
        `list` of `str`: Names of the classes of blocks.

    Raises:
        BucketingError: If diffusers names no repeated blocks of this class.
    """
    model: Any = unwrap(transformer)
    names = compiled_classes(model)
    # Sizes that happen to be equal in one batch are not in the next: without this, such a batch is compiled again.
    shape_settings.use_duck_shape = False
    # Blocks share their code, so its graphs add up, as of training and of validation. Past the limit torch computes
    # without a graph, also where checkpointing computes again what had one.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS_OF_A_BLOCK)
    model.compile_repeated_blocks(**options)
    for module in model.modules():
        if type(module).__name__ in names:
            module._compiled_call_impl = _OfAnySize(module._compiled_call_impl)
    return names


def compiled_classes(transformer: torch.nn.Module) -> list[str]:
    """Return the names of the classes of blocks that [`compile_blocks`] compiles; the weights may be missing.

    Raises:
        BucketingError: If diffusers names no repeated blocks of this class.
    """
    names = list(getattr(transformer, "_repeated_blocks", None) or [])
    if not names:
        raise BucketingError(
            f"Omit `compile`: diffusers names no repeated blocks of {type(transformer).__name__}, by which its blocks "
            "are compiled."
        )
    return names


class _OfAnySize:
    """A compiled block that gets one graph for inputs of all sizes, and one for the first block and all others."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = args
        if isinstance(first, torch.Tensor) and torch.is_grad_enabled() and not first.requires_grad:
            first = first.detach().requires_grad_()  # as that of later blocks, where the first layers are frozen
        for value in tree_leaves((first, others, kwargs)):
            if isinstance(value, torch.Tensor):
                channels = 1 if value.is_floating_point() else 0
                torch._dynamo.maybe_mark_dynamic(value, list(range(value.ndim - channels)))
        return self.compiled(first, *others, **kwargs)
