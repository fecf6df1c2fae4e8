"""Whether a transformer still computes what diffusers wrote: its modules, their forwards, and the hooks around them.

Packing is right for the code that it was written for. Wrappers and hooks of known packages move, cast, shard, compile,
checkpoint or adapt what a module computes; those of anyone else may mix the tokens of a pack, so they are refused. So
are the hooks of diffusers that replace what a module computes by something cached, skipped or blurred.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch.nn.modules import module as torch_module

from ..errors import PackingError

_KNOWN = frozenset({"accelerate", "deepspeed", "diffusers", "hf_bucketing", "peft", "torch"})
"""Packages whose wrappers and hooks keep the tokens of samples apart."""

_HOOKS_OF_DIFFUSERS = frozenset(
    f"diffusers.hooks.{name}" for name in ("group_offloading", "layerwise_casting", "context_parallel")
)
"""Modules of diffusers whose hooks move and cast weights, or share tokens among processes; others replace results."""

Named: TypeAlias = tuple[str, torch.nn.Module]


class StockModule(NamedTuple):
    """A module of diffusers inside a transformer, and the module that holds it."""

    name: str
    module: torch.nn.Module
    parent: torch.nn.Module

    @property
    def in_place(self) -> bool:
        """Whether the parent still holds the module itself, not in a wrapper."""
        return self.parent._modules.get(self.name.rpartition(".")[2]) is self.module


@dataclass(frozen=True, slots=True, kw_only=True)
class StockModules:
    """The modules of a transformer that run diffusers' code.

    Args:
        model (`torch.nn.Module`): The transformer.
        parts (`tuple` of [`StockModule`]): The modules in it whose classes are diffusers', or derived from them.
        hooked (`tuple` of `(str, torch.nn.Module)`): Modules whose hooks see tokens: its blocks and their attention.
        num_blocks (`int`): Number of its blocks.
    """

    model: torch.nn.Module
    parts: tuple[StockModule, ...]
    hooked: tuple[Named, ...]
    num_blocks: int

    @classmethod
    def of(cls, model: torch.nn.Module, *, attentions: Iterable[Named]) -> StockModules:
        """Find the modules of a transformer, whose attention modules are given with their names."""
        modules, blocks = dict(model.named_modules()), _blocks_of(model)
        parts = (
            StockModule(name, module, modules[name.rpartition(".")[0]])
            for name, module in modules.items()
            if name and _is_of_diffusers(cast(Any, type(module)))
        )
        return cls(model=model, parts=tuple(parts), hooked=(*blocks, *attentions), num_blocks=len(blocks))

    def check(self) -> None:
        """Check that nobody else's code runs in the transformer; it takes a microsecond or two per module.

        Raises:
            PackingError: If a module of diffusers was replaced, a block was added, one of them or the transformer has
                another forward, or the transformer, a block or an attention module has a hook that is not known to
                keep the tokens of samples apart; the message names it.
        """
        blocks = _blocks_of(self.model)
        if len(blocks) != self.num_blocks or not all(part.in_place for part in self.parts):
            self._check_places()
        for name, module in (("", self.model), *((part.name, part.module) for part in self.parts)):
            if (code := replaced_forward(module)) is not None:
                raise PackingError(
                    f"The forward of {_described(name, module)} was replaced by {code}, so packing cannot know how it "
                    "treats the tokens of several samples. Restore it, or train this model with bucketed batches."
                )
        for name, module in (("", self.model), *self.hooked, *blocks):  # blocks may be in wrappers by now
            if (code := _unknown_hook(module._forward_pre_hooks, module._forward_hooks)) is not None:
                raise PackingError(
                    f"{_described(name, module)} has the hook {code}, which may mix the tokens of several samples. "
                    "Remove it, put it on a module inside if it only looks, or train this model with bucketed batches."
                )
        if code := _unknown_hook(torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks):
            raise PackingError(
                f"torch has the global hook {code}, which may mix the tokens of several samples; remove it."
            )

    def _check_places(self) -> None:
        """Refuse modules that were replaced, removed or added; wrappers around them are none of these."""
        before = {id(part.module): part.name for part in self.parts}
        now = {id(part.module): part.name for part in StockModules.of(self.model, attentions=()).parts}
        gone = [f"{name} was replaced or removed" for key, name in before.items() if key not in now]
        new = [f"{name} was added" for key, name in now.items() if key not in before]
        if gone or new:
            raise PackingError(
                f"{(gone or new)[0]} after enable_packing, so the model would not run a pack. Call "
                "disable_packing(transformer), change the model, then enable_packing(transformer) again."
            )


def _blocks_of(model: torch.nn.Module) -> list[Named]:
    """Return the members of a transformer's own lists, such as `transformer_blocks`, each with its name."""
    return [
        (f"{name}.{index}", block)
        for name, child in model.named_children()
        if isinstance(child, torch.nn.ModuleList)
        for index, block in enumerate(child)
    ]


def replaced_forward(module: torch.nn.Module) -> str | None:
    """Return what a module's forward was replaced by; None if it is diffusers' own, inside known wrappers or not."""
    cls: Any = type(module)
    stock, replaced = cls.forward, module.__dict__.get("forward")
    if not _is_stock_forward(cls, stock):
        return _name_of(stock)
    if replaced is None:
        return None
    return _unknown_layer(replaced, down_to=stock) or _unknown_model_hook(module)


@functools.cache
def _is_of_diffusers(cls: type[Any]) -> bool:
    return any(_package(base.__module__) == "diffusers" for base in cls.__mro__)


@functools.cache
def _is_stock_forward(cls: type[Any], forward: Callable[..., Any]) -> bool:
    """Return whether the forward of a class is defined by a class of diffusers, and not put there from elsewhere."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    return _package(owner.__module__) in ("diffusers", "torch") and _unknown_layer(forward, down_to=None) is None


def _unknown_layer(function: Callable[..., Any], *, down_to: Callable[..., Any] | None) -> str | None:
    """Return the name of the first function of a chain of wrappers that is not known; None if all are.

    Args:
        function (callable): The outermost wrapper; each refers to the next by `__wrapped__`.
        down_to (callable, *optional*): What must be wrapped; by default whatever the last one is.
    """
    layer: Any = function
    while True:
        source = _innermost_of(layer)
        if down_to is not None and source is down_to:
            return None
        if _package(_module_of(source)) not in _KNOWN:
            return _name_of(source)
        if (wrapped := getattr(layer, "__wrapped__", None)) is None:
            return None if down_to is None else _name_of(source)
        layer = wrapped


def _unknown_hook(*hooks: dict[int, Callable[..., Any]]) -> str | None:
    """Return the name of the first hook that is not known."""
    names = (_unknown_layer(hook, down_to=None) for group in hooks for hook in group.values())
    return next((name for name in names if name is not None), None)


def _unknown_model_hook(module: torch.nn.Module) -> str | None:
    """Return the first hook of accelerate or diffusers that replaces what a module computes, or is somebody else's."""
    outer, registry = (module.__dict__.get(name) for name in ("_hf_hook", "_diffusers_hook"))
    hooks = [hook for hook in (outer, *getattr(outer, "hooks", ())) if hook is not None]
    hooks += () if registry is None else registry.hooks.values()
    for hook in hooks:
        module_name = type(hook).__module__
        package = _package(module_name)
        if package not in _KNOWN or (package == "diffusers" and module_name not in _HOOKS_OF_DIFFUSERS):
            return f"the hook {module_name}.{type(hook).__qualname__}"
    return None


def _innermost_of(function: Any) -> Any:
    """Return the function of a bound method or of a partial one."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _module_of(function: Any) -> str:
    """Return the module in which a function, or the class of another callable, is written; `wraps` hides it."""
    written = getattr(function, "__globals__", None)
    return str(type(function).__module__ if written is None else written["__name__"])


def _package(module: str) -> str:
    return module.partition(".")[0]


def _name_of(function: Any) -> str:
    source = _innermost_of(function)
    named = source if hasattr(source, "__globals__") else type(source)
    code = getattr(source, "__code__", None)
    return f"{_module_of(source)}.{named.__qualname__ if code is None else code.co_name}"


def _described(name: str, module: torch.nn.Module) -> str:
    cls = f"{type(module).__module__}.{type(module).__qualname__}"
    return f"{name} ({cls})" if name else f"this {cls}"
