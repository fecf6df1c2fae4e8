"""What a forward carries beside its arguments: the layout of its pack, and inputs that must stay exact.

Gradient checkpointing computes a block again during backward. A layout kept on the module would then belong to another
pack, so the layout is bound into the checkpointed call and read from a thread-local variable that is set for that call
alone. It is not a `ContextVar`, at which torch.compile breaks its graph.

FSDP's mixed precision and DeepSpeed cast all inputs of a model to half precision, in which 999 becomes 1000, and a
third of a second 0.334. The models compute positions and the embeddings of timesteps in float32, so their inputs must
still be exact, in buckets as in packs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Lock, local
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from ..errors import PackingError
from .layout import PackedLayout


class _Active(local):
    def __init__(self) -> None:  # in each thread, so that graphs of torch.compile find the same attributes in all
        self.layout: PackedLayout | None = None
        self.exact: Mapping[str, Any] | None = None


_active = _Active()
_binding = Lock()


def active_layout() -> PackedLayout:
    """Return the layout of the pack that is being computed.

    Raises:
        PackingError: If no pack is being computed: the model was called without `packed_forward`, or its blocks are
            recomputed by something that `packed_forward` does not know (see [`bind_checkpoints`]).
    """
    layout = _active.layout
    if layout is None:
        raise PackingError(
            "This transformer has packing enabled, but no pack is being computed. Call packed_forward(…), or "
            "disable_packing(transformer) first. For gradient checkpointing use "
            "transformer.enable_gradient_checkpointing() or the activation checkpointing of FSDP, which "
            "packed_forward binds to its pack."
        )
    return layout


def layout_in_use() -> PackedLayout | None:
    """Return the layout that [`use_layout`] makes active; None where none is."""
    return _active.layout


@contextmanager
def use_layout(layout: PackedLayout) -> Iterator[None]:
    """Make `layout` the active one inside a `with` block, for callers of the transformer's own forward."""
    before, _active.layout = _active.layout, layout
    try:
        yield
    finally:
        _active.layout = before


def bind_checkpoints(model: torch.nn.Module) -> None:
    """Make every gradient-checkpointed call that `model` makes carry the layout that is active when it is made.

    Such calls come from diffusers' `enable_gradient_checkpointing`, and from the wrappers that FSDP's activation
    checkpointing puts around blocks. Their functions are replaced once and stay so, because other threads may be
    computing other packs with them; both kinds may come at any time, so each forward looks for new ones.
    """
    for module, name in _checkpointing(model):
        if not isinstance(vars(module)[name], _BoundCheckpoint):
            with _binding:
                if not isinstance(checkpoint := vars(module)[name], _BoundCheckpoint):
                    setattr(module, name, _BoundCheckpoint(checkpoint, takes_kwargs=name == "checkpoint_fn"))


def release_checkpoints(model: torch.nn.Module) -> None:
    """Restore the checkpoint functions that [`bind_checkpoints`] replaced."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, _BoundCheckpoint):
                setattr(module, name, value.checkpoint)


def _checkpointing(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """Return the modules that checkpoint, and the attributes of their functions; faster than by `modules()`."""
    stack = [model]
    while stack:
        module = stack.pop()
        if isinstance(module, CheckpointWrapper):
            yield module, "checkpoint_fn"
        elif module.__dict__.get("gradient_checkpointing"):
            yield module, "_gradient_checkpointing_func"
        stack += [child for child in module._modules.values() if child is not None]


class _BoundCheckpoint:
    """A checkpoint function whose recomputation has the layout that was active when it was called.

    diffusers' own functions take no keywords, though some of its models pass them (HunyuanImage): the block gets them.
    """

    def __init__(self, checkpoint: Callable[..., Any], *, takes_kwargs: bool) -> None:
        self.checkpoint = checkpoint
        self.takes_kwargs = takes_kwargs

    def __call__(self, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs and not self.takes_kwargs:
            block, kwargs = partial(block, **kwargs), {}
        if _active.layout is not None:
            block = WithLayout(block, _active.layout)
        return self.checkpoint(block, *args, **kwargs)


class WithLayout:
    """A block and its pack's layout, as an object: torch.compile follows calls of objects into checkpoints."""

    def __init__(self, block: Callable[..., Any], layout: PackedLayout) -> None:
        self.block = block
        self.layout = layout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and _active.layout is not None:
            return self.block(*args, **kwargs)  # the graph holds its layout's tensors in the backward too
        with use_layout(self.layout):
            return self.block(*args, **kwargs)


def exact_timesteps(timesteps: torch.Tensor) -> torch.Tensor:
    """Return timesteps in at least float32, in which their embedding is computed.

    Raises:
        PackingError: If the timesteps are in half precision.
    """
    if timesteps.is_floating_point() and timesteps.dtype.itemsize < 4:
        raise PackingError(f"Timesteps must be whole numbers or at least float32, got {timesteps.dtype}.")
    return timesteps if timesteps.is_floating_point() else timesteps.float()


@contextmanager
def exact_inputs(kwargs: Mapping[str, Any], *, cast: Collection[str]) -> Iterator[None]:
    """Remember the inputs of a forward that positions and schedules read, inside a `with` block.

    Args:
        kwargs (mapping of `str` to any): Arguments of the forward.
        cast (collection of `str`): Those that the model's layers take in their own dtype, `cast_inputs` of the family.
    """
    before = _active.exact
    _active.exact = {name: value for name, value in kwargs.items() if name not in cast}
    try:
        yield
    finally:
        _active.exact = before


def keep_inputs_exact(transformer: torch.nn.Module) -> RemovableHandle:
    """Hook a transformer so that it gets the inputs that [`exact_inputs`] remembers, even if wrappers cast them."""
    return transformer.register_forward_pre_hook(_restore, with_kwargs=True)


def keeps_inputs_exact(transformer: torch.nn.Module) -> bool:
    """Return whether [`keep_inputs_exact`] hooked a transformer."""
    return _restore in transformer._forward_pre_hooks.values()


def _restore(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _active.exact is None:
        return None
    exact = {name: value for name, value in _active.exact.items() if name in kwargs}
    cast = tree_leaves([value for name, value in kwargs.items() if name not in exact])
    device = next(leaf.device for leaf in cast if isinstance(leaf, torch.Tensor))  # wrappers may also move inputs
    return args, {**kwargs, **tree_map_only(torch.Tensor, lambda value: value.to(device), exact)}
