"""A pretended accelerator: tensors with real numbers that say they lie on another device ("meta").

They compute on the CPU, and refuse operations that mix devices, as CUDA does, single numbers aside. What waits for the
device is recorded: a number that is read, sizes that depend on values (`nonzero`, boolean indices), an event, and a
copy that is not told not to wait (`non_blocking`), a single number that is put into an element of a tensor included.
One to the CPU that does not wait has no numbers before an event that was recorded after it is waited for. Forward,
backward, autocast and optimizers run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.waits import Waits

aten = torch.ops.aten
DEVICE = torch.device("meta")
CPU = torch.device("cpu")

_WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
}
_UNREAD = -77
"""What memory holds before a copy has come."""
_WRITING = {aten.index_put.default, aten.index_put_.default}
_INDEXING = {aten.index.Tensor, *_WRITING}
_COPYING_NUMBERS = {*_WRITING, aten.where.self}
"""Operations that copy single numbers on the CPU to the device, where others are launched with them."""
_TAKING_NUMBERS = {*_COPYING_NUMBERS, aten.fill.Tensor, aten.fill_.Tensor}
"""Operations that take single numbers on the CPU, as those do that work element by element."""
_READING_VALUE = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor}
"""Operations that read their last argument, a single number, if it lies on the device."""
_LAZY = {aten._conj.default: torch.conj_physical, aten._neg_view.default: torch.neg}
"""Views that are computed when they are read, which a wrapper around a tensor does not carry."""


class DeviceTensor(torch.Tensor):
    """A tensor on the pretended device; `numbers` holds them."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, requires_grad: bool = False) -> DeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            layout=numbers.layout,
            device=DEVICE,
            requires_grad=requires_grad,
        )
        tensor.numbers = numbers.detach()
        return tensor

    def __repr__(self, **kwargs: Any) -> str:
        return f"DeviceTensor({self.numbers!r})"

    is_meta = property(lambda self: False)  # it has numbers

    def tolist(self) -> Any:
        _waits.record("tolist")
        return self.numbers.tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a tensor on a device cannot become an array; copy it to the CPU first")

    numpy = __array__

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
        made = torch.tensor(data, dtype=dtype or self.dtype)
        if device is not None and torch.device(device) != DEVICE:
            return made
        _record_copy(made, "the device")
        return DeviceTensor(made, requires_grad)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, (bool, int, float)):
            value = torch.tensor(value, dtype=self.dtype)  # where torch has it if the tensor is on CUDA
        super().__setitem__(_without_lists(index), value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = DeviceTensor(self.numbers.clone(), self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        return memo.setdefault(id(self), made)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _without_lists(index: Any) -> Any:
    """Return an index whose lists are tensors: torch would make them on "meta", without numbers."""
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)


def on_cpu(value: Any) -> Any:
    """Return tensors, also in lists and dictionaries, as they are on the CPU; this is not recorded."""
    return map_tensors(value, lambda tensor: tensor.numbers if isinstance(tensor, DeviceTensor) else tensor)


def on_device(value: Any) -> Any:
    """Return tensors, also in lists and dictionaries, as they are on the pretended device."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = isinstance(tensor, DeviceTensor)
        return tensor if moved else DeviceTensor(tensor.detach().clone(), tensor.requires_grad)

    return map_tensors(value, move)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change the tensors in tuples, lists and dictionaries, in much less time than torch's pytree takes."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: map_tensors(part, change) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(part, change) for part in value)
    return value


def module_on_device(module: torch.nn.Module) -> torch.nn.Module:
    """Put the weights and buffers of a module on the pretended device."""
    moved: dict[int, torch.Tensor] = {}  # weights that modules share stay shared
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None:
                parameter = torch.nn.Parameter(on_device(weight.detach()), weight.requires_grad)
                part._parameters[name] = moved.setdefault(id(weight), parameter)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = moved.setdefault(id(buffer), on_device(buffer))
    return module


@contextmanager
def pretended_device() -> Iterator[Waits]:
    """Let `torch.tensor` and the like know the device inside a `with` block; yield what waits, and where, counted."""
    _waits.clear()
    _under_way.clear()
    autocast = torch.autocast

    def making(make: Any) -> Any:
        def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
            if isinstance(data, list):  # torch reads the numbers of the tensors among its entries
                data = [part.tolist() if isinstance(part, DeviceTensor) else part for part in data]
            made = make(data, **kwargs)
            moves = device is not None and torch.device(device) == DEVICE and not isinstance(made, DeviceTensor)
            if moves:
                _record_copy(made, "the device")
            return DeviceTensor(made) if moves else made

        return tensor

    class Autocast(autocast):
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__("cpu" if device_type == "meta" else device_type, *args, **kwargs)

    with (
        patch.object(torch, "tensor", making(torch.tensor)),
        patch.object(torch, "as_tensor", making(torch.as_tensor)),
        patch.object(torch, "autocast", Autocast),
        patch.object(torch, "Event", _Event),
        _Mode(),
    ):
        yield _waits


_waits = Waits()
_under_way: list[tuple[torch.Tensor, torch.Tensor]] = []
"""Copies to the CPU that nothing has waited for, each with its numbers."""


class _Event:
    """An event of the device, which is reached when it is waited for."""

    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE

    def record(self) -> None:
        self._copies = list(_under_way)

    def synchronize(self) -> None:
        _waits.record("wait for an event")
        for target, numbers in self._copies:
            target.copy_(numbers)


def _record_copy(tensor: torch.Tensor, to: str) -> None:
    if tensor.numel():
        _waits.record(f"copy to {to}")


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the numbers, after checking where its tensors are said to lie."""
    tensors: list[torch.Tensor] = []
    map_tensors((args, kwargs), lambda tensor: tensors.append(tensor) or tensor)
    any_moved = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
    device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if func is aten._fused_sdp_choice.default:
        return 0  # the kernel that is made of other operations
    if func in _LAZY and any_moved:
        return DeviceTensor(_LAZY[func](on_cpu(args[0])))
    if any_moved:
        _check_and_record(func, args, kwargs, tensors)
    if func is aten.copy_.default:
        target, source = args[:2]
        if isinstance(source, DeviceTensor) and not isinstance(target, DeviceTensor):
            _record_copy(source, "the CPU")
        elif isinstance(target, DeviceTensor) and not isinstance(source, DeviceTensor):
            _record_copy(source, "the device")
        on_cpu(target).copy_(on_cpu(source))
        return target
    moved = dict(kwargs)
    if device == DEVICE or (func is aten._to_copy.default and device is not None):
        moved = {**moved, "device": CPU, "pin_memory": None, "non_blocking": False}
        moved = {name: value for name, value in moved.items() if name in kwargs and value is not None}
    leaves = func is aten._to_copy.default and device is not None and any_moved != (device == DEVICE)
    if leaves and not kwargs.get("non_blocking"):
        _record_copy(args[0], "the CPU" if any_moved else "the device")
    result = func(*on_cpu(args), **on_cpu(moved))
    if leaves and any_moved and kwargs.get("non_blocking"):
        _under_way.append((result, result.clone()))
        return result.fill_(_UNREAD)
    if not (any_moved if device is None else device == DEVICE):
        return result
    declared = zip(args, func._schema.arguments, strict=False)
    written = [arg for arg, about in declared if about.alias_info is not None and about.alias_info.is_write]
    if written and isinstance(result, torch.Tensor):
        return written[0]
    return map_tensors(result, lambda tensor: DeviceTensor(on_cpu(tensor)))


def _check_and_record(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> None:
    indices = [index for index in args[1] if index is not None] if func in _INDEXING else []
    numbers = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor) and not tensor.ndim]
    masked = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    fills = func in _WRITING and numbers and len(masked) == len(indices)  # torch calls masked_fill with the number
    for index in indices:
        if not isinstance(index, DeviceTensor) and isinstance(args[0], DeviceTensor):
            _record_copy(index, "the device")
        elif any(index is mask for mask in masked) and not fills:
            _waits.record(str(func))
    if func in _COPYING_NUMBERS and not fills:
        for number in numbers:
            _record_copy(number, "the device")
    if func in _READING_VALUE and isinstance(args[-1], DeviceTensor):
        _waits.record(str(func))
    if func in _WAITING or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
        _waits.record(str(func))
    indices_by_id = set(map(id, indices))
    takes_numbers = torch.Tag.pointwise in func.tags or func in _TAKING_NUMBERS
    apart = [
        tensor
        for tensor in tensors
        if not isinstance(tensor, DeviceTensor)
        and id(tensor) not in indices_by_id
        and (tensor.ndim or not takes_numbers)
    ]
    if apart and func not in (aten.copy_.default, aten._to_copy.default):
        raise RuntimeError(
            f"Expected all tensors on one device, but {func} got one of {tuple(apart[0].shape)} on {apart[0].device}."
        )
