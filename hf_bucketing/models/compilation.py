"""Compile the blocks of a transformer, so that packs and buckets of ever new composition share a few graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental._config as shape_settings
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import BucketingError
from ..packing.attachment import ATTRIBUTE, unwrap
from ..packing.attention.dispatch import breaks_graphs
from ..packing.pack import Packing
from .registry import find_family

GRAPHS_OF_A_BLOCK = 32
"""Graphs of a kind of block that torch may compile; by default 8."""


def compile_blocks(transformer: torch.nn.Module, **options: Any) -> list[str]:
    """Compile the blocks of a diffusers transformer in place, by its `compile_repeated_blocks`.

    The graphs of the first batch serve batches of all other sizes. Compile after adapters were added; packing may be
    enabled before or after. What a compiled model computes differs from the model itself by rounding alone.

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
            in_parts = torch.compile(module._call_impl, **{**options, "dynamic": True})
            module._compiled_call_impl = _CompiledBlock(module, module._compiled_call_impl, in_parts, model)
    return names


def compiled_classes(transformer: torch.nn.Module) -> list[str]:
    """Return the names of the classes of blocks that [`compile_blocks`] compiles; the weights may be missing.

    Raises:
        BucketingError: If diffusers names no repeated blocks of this class, or torch cannot trace them in packs.
    """
    reason = refusal(type(transformer))
    if reason is not None:
        raise BucketingError(f"Omit `compile` with a {type(transformer).__name__}: {reason}.")
    return list(transformer._repeated_blocks)  # type: ignore[arg-type]


def refusal(model_class: type) -> str | None:
    """Return why [`compile_blocks`] does not compile the blocks of a class of diffusers; None if it does."""
    if not getattr(model_class, "_repeated_blocks", None):
        return "diffusers names no repeated blocks of it, by which they are compiled"
    family = find_family(model_class.__name__)
    return None if family is None else family.untraceable


class _CompiledBlock:
    """A compiled block that gets one graph for inputs of all sizes, and one for the first block and all others.

    Args:
        block (`torch.nn.Module`): The block.
        full_graph (callable): The block, compiled for packs whose attention is a node of the graph, and for stacks.
        in_parts (callable): The block, compiled for packs whose attention breaks the graph. All sizes are variables
            there from the first graph on, as inputs of what follows a break cannot be marked.
        transformer (`torch.nn.Module`): Transformer that the block belongs to.
    """

    def __init__(
        self,
        block: torch.nn.Module,
        full_graph: Callable[..., Any],
        in_parts: Callable[..., Any],
        transformer: torch.nn.Module,
    ) -> None:
        self.full_graph, self.in_parts, self.transformer = full_graph, in_parts, transformer
        self.attentions = [layer for layer in block.modules() if hasattr(layer, "processor")]
        self.broken = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor) and torch.is_grad_enabled() and not args[0].requires_grad:
            # As that of later blocks, where the first layers are frozen.
            args = (args[0].detach().requires_grad_(), *args[1:])
        attachment = vars(self.transformer).get(ATTRIBUTE)
        tokens = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        self._break(attachment is not None and _breaks(attachment.packing, tokens))
        args, kwargs = tree_map_only(torch.Tensor, _in_order, (args, kwargs))
        if self.broken:
            return self.in_parts(*args, **kwargs)
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                channels = 1 if value.is_floating_point() and value.ndim > 1 else 0
                torch._dynamo.maybe_mark_dynamic(value, list(range(value.ndim - channels)))
        return self.full_graph(*args, **kwargs)

    def _break(self, broken: bool) -> None:
        """Let the graph end before each attention layer and begin after it, or let it hold these layers.

        A break deep inside a layer would divide its first call otherwise than those after it. Checkpointing would find
        other tensors saved by a recomputation than by its forward, and refuse it.
        """
        if broken != self.broken:
            self.broken = broken
            for layer in self.attentions:
                layer._compiled_call_impl = torch.compiler.disable(layer._call_impl) if broken else None


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in the order of their dimensions: later blocks get views of what earlier ones joined."""
    return tensor if 0 in tensor.stride() else tensor.contiguous()


def _breaks(packing: Packing, tokens: torch.Tensor) -> bool:
    """Return whether a graph cannot hold the attention of packs, by the inputs of a block."""
    return breaks_graphs(packing.backend, tokens) or packing.family.breaks_graphs(packing.transformer.config)
