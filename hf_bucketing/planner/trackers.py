"""Modes of torch that trace a step: its highest memory by phase, its operations, and values that a forward knows."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

Phase: TypeAlias = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Bytes of a transformer at one time, by kind.

    Attributes:
        weights (`float`): Weights and buffers; where they are sharded, also those that are gathered.
        gradients (`float`): Gradients of weights; where they are sharded, also those that are being reduced.
        activations (`float`): Everything else: inputs, activations, and what the backward pass makes of them.
    """

    weights: float = 0
    gradients: float = 0
    activations: float = 0

    @property
    def total(self) -> float:
        """Sum of all kinds."""
        return self.weights + self.gradients + self.activations

    def plus(self, other: Kinds, times: float = 1) -> Kinds:
        """Return this and some times the other."""
        return Kinds(
            weights=self.weights + times * other.weights,
            gradients=self.gradients + times * other.gradients,
            activations=self.activations + times * other.activations,
        )


Peaks: TypeAlias = Mapping[Phase, Kinds]
"""What exists at the moment of the highest memory of each phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Floating-point operations, a multiply-add as two, by what they serve.

    Args:
        forward (`float`): Forward passes that are trained.
        backward (`float`): Backward passes: gradients of activations, and of the weights that are trained.
        recomputed (`float`): What backward passes compute again: checkpointed blocks, and the scores of attention.
        base (`float`): Forward passes without gradients, whose predictions are targets.
    """

    forward: float = 0
    backward: float = 0
    recomputed: float = 0
    base: float = 0

    @property
    def hardware(self) -> float:
        """All operations that are computed."""
        return self.forward + self.backward + self.recomputed + self.base

    def plus(self, other: Flops, times: float = 1) -> Flops:
        """Return these and some times the others."""
        return Flops(
            forward=self.forward + times * other.forward,
            backward=self.backward + times * other.backward,
            recomputed=self.recomputed + times * other.recomputed,
            base=self.base + times * other.base,
        )


class _Modules:
    """What the trackers ask of torch's ModTracker, without its hooks.

    These hooks keep gradients of activations until the backward pass ends, which no training run does, fail on frozen
    weights, and take most of the time.
    """

    parents: frozenset[str] = frozenset()

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}

    @property
    def is_bw(self) -> bool:
        """Whether the backward pass runs."""
        return _in_backward()

    def get_known_fqn(self, module: torch.nn.Module) -> str:
        """Return the name of a module."""
        return self._names[module]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


class NotCompiled:
    """Base of modes that torch need not hide from its compiler at each operation, which takes a tenth of a trace."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class FlopCounter(NotCompiled, TorchDispatchMode):
    """Count floating-point operations of matrix products, convolutions and attention; a multiply-add counts as two.

    torch's FlopCounterMode asks each operation whether it is made of others, and each module whether it is called,
    which takes as long as the rest of a trace. Its formulas are those of torch, which counts flash attention on GPUs
    alone; that on the CPU, which traces take, has the same formula.

    During a backward pass, gradients are recorded only while a checkpoint computes its block again. The backward pass
    of fused attention has five products of scores, of which the first computes those of the forward pass again.

    Attributes:
        flops ([`Flops`]): What was counted.
    """

    def __init__(self) -> None:
        super().__init__()
        aten: Any = torch.ops.aten
        self.flops = Flops()
        self._formulas = {
            **flop_registry,
            aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
        }
        self._fused = {packet for packet in self._formulas if _is_backward_of_attention(packet)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = self._formulas.get(func._overloadpacket)
        if formula is None and _is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if formula is not None:
            self.flops = self.flops.plus(self._serving(func, formula(*args, **kwargs, out_val=result)))
        return result

    def _serving(self, func: Any, count: float) -> Flops:
        """Return operations that are being computed, by what they serve."""
        records = torch.is_grad_enabled()
        if not _in_backward():
            return Flops(forward=count) if records else Flops(base=count)
        if records:
            return Flops(recomputed=count)
        again = count / 5 if func._overloadpacket in self._fused else 0
        return Flops(backward=count - again, recomputed=again)


def _in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def _is_backward_of_attention(packet: Any) -> bool:
    name = str(packet)
    return "attention" in name and "backward" in name


@functools.cache
def _is_made_of_others(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _device_of(func: Any, tensor: Any = None) -> torch.device | None:
    """Return the answer to an operation that asks for the device of a pretended tensor; None for any other.

    Kernels ask three times as often as they compute, and each further mode would pass the question on.
    """
    if func is not torch.ops.prim.device.default:
        return None
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


class PeakTracker(NotCompiled, MemTracker):
    """Keep the highest memory of each phase."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._mod_tracker: Any = _Modules(model)
        self.phase: Phase = "forward"
        self.peaks: dict[Phase, Kinds] = {}

    @classmethod
    def of(cls, model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> PeakTracker:
        """Return a tracker that counts a model, what it is called with, and the gradients of its weights."""
        tracker = cls(model)
        tracker.track_external(model, *inputs)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(tracker._track_gradient)
        return tracker

    def __enter__(self) -> PeakTracker:
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *args: Any) -> None:
        TorchDispatchMode.__exit__(self, *args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Track what an operation returns, as MemTracker does, without what it asks for the sake of other callers."""
        device = _device_of(func, *args[:1])
        if device is not None:
            return device
        result = func(*args, **kwargs or {})
        kind = _MemRefType.TEMP if self._mod_tracker.is_bw else _MemRefType.ACT
        for tensor in [result] if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._track(kind, tensor)
        self._update_peak_stats(None)
        return result

    def _track_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, "it was just accumulated"
        self._update_and_maybe_create_winfos(parameter.grad, _MemRefType.GRAD)

    def _update_peak_stats(self, peak_state: Any) -> None:
        _keep_highest(self, (_MemRefType.PARAM, _MemRefType.BUFFER), (_MemRefType.GRAD,))


class ShardedPeakTracker(FSDPMemTracker):
    """Keep the highest memory of each phase, of a model that FSDP2 shards."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._mod_tracker: Any = _Modules(model)
        self.phase: Phase = "forward"
        self.peaks: dict[Phase, Kinds] = {}

    @classmethod
    def of(cls, model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> ShardedPeakTracker:
        """Return a tracker that counts a model, what it is called with, and the gradients of its weights."""
        tracker = cls(model)
        tracker.track_inputs(tuple(inputs))
        return tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _device_of(func, *args[:1]) or super().__torch_dispatch__(func, types, args, kwargs)

    def _update_peak_stats(self, peak_state: Any) -> None:
        weights = (
            _FSDPRefType.SHARDED_PARAM,
            _FSDPRefType.UNSHARDED_PARAM,
            _FSDPRefType.ALL_GATHER,
            _FSDPRefType.BUFFER,
        )
        gradients = _FSDPRefType.SHARDED_GRAD, _FSDPRefType.UNSHARDED_GRAD, _FSDPRefType.REDUCE_SCATTER
        _keep_highest(self, weights, gradients)


def _keep_highest(tracker: PeakTracker | ShardedPeakTracker, weights: Sequence[Any], gradients: Sequence[Any]) -> None:
    for memory in tracker._curr_mem_snap.values():
        peak = tracker.peaks.get(tracker.phase)
        if peak is None or memory["Total"] > peak.total:
            counts: Mapping[Any, int] = memory
            kinds = sum(counts[kind] for kind in weights), sum(counts[kind] for kind in gradients)
            tracker.peaks[tracker.phase] = Kinds(
                weights=kinds[0], gradients=kinds[1], activations=counts["Total"] - sum(kinds)
            )


_MOST = 2**20
"""Numbers of a result, if more than in each of its inputs, beyond which only its shape is kept: no mask of attention
over all tokens is made."""

_FACTORIES = frozenset(
    {torch.ops.aten.ones.default, torch.ops.aten.zeros.default, torch.ops.aten.full.default}
    | {torch.ops.aten.scalar_tensor.default}
    | {torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step}
)
_INDEXING = frozenset(
    {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
)


class KnownValues(NotCompiled, TorchDispatchMode):
    """Compute what follows from constants and tensors with values alone, inside a `FakeTensorMode`.

    A forward may then branch on such values, and index by a mask among them.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INDEXING:
            args = (args[0], _numbered(args[1]), *args[2:])
        if FakeTensor in types:
            return func(*args, **kwargs)
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        if not all(map(_is_known, tensors)) or (not tensors and func not in _FACTORIES):
            return func(*args, **kwargs)
        try:
            shapes = [shape for shape in tree_leaves(func(*args, **kwargs)) if isinstance(shape, torch.Tensor)]
        except (DataDependentOutputException, DynamicOutputShapeException):
            shapes = []
        if sum(tensor.numel() for tensor in shapes) > max([_MOST, *(tensor.numel() for tensor in tensors)]):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _numbered(indices: Sequence[Any]) -> list[Any]:
    """Return indices in which masks with values are replaced by the numbers of what they keep."""
    numbered: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype == torch.bool and _is_known(index):
            with unset_fake_temporarily():
                numbered += index.nonzero().unbind(1)
        else:
            numbered.append(index)
    return numbered


def _is_known(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta
