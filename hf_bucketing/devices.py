"""Copies to a device and from it that do not wait for what it still computes, and its own time."""

from __future__ import annotations

import time

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor on a device, which by default has its dtype.

    A plain copy from the CPU waits until the device has done all that was started before. This one does not: CUDA
    reads the tensor before the call returns. MPS may read it later, so there the copy is a plain one, and so it is to
    the CPU, which would not have the values yet.
    """
    waits = tensor.device.type != "cpu" or torch.device(device).type == "mps"
    return tensor.to(device, dtype=dtype, non_blocking=not waits)


class Reading:
    """Tensors of one dtype on their way to the CPU, which nothing waits for before their [`values`][Reading.values].

    CUDA copies to page-locked memory, in the order of its stream. From the CPU and MPS, the copy is a plain one.

    Args:
        tensors (`torch.Tensor`): Tensors on one device.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        joined = torch.cat([tensor.flatten() for tensor in tensors])
        self._shapes = [tensor.shape for tensor in tensors]
        waits = joined.device.type in ("cpu", "mps")
        self._joined = joined.to("cpu", non_blocking=not waits)
        self._event = None if waits else torch.Event(joined.device)
        if self._event is not None:
            self._event.record()

    def values(self) -> list[torch.Tensor]:
        """Return the tensors as they are on the CPU, after one wait for all of them."""
        if self._event is not None:
            self._event.synchronize()
        parts = self._joined.split([shape.numel() for shape in self._shapes])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class DeviceTimer:
    """Time that a device takes for what a program starts from here to [`stop`][DeviceTimer.stop].

    A program reaches both places before the device has computed what lies between them, so that the device notes the
    times itself, as events of its stream. The CPU computes at once.

    Args:
        device (`torch.device`): The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.Event, torch.Event] | None = None
        if device.type not in ("cpu", "meta"):
            self._events = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
            self._events[0].record()
        self._start = self._end = time.perf_counter()

    def stop(self) -> None:
        """End the time that is measured."""
        if self._events is not None:
            self._events[1].record()
        self._end = time.perf_counter()

    def seconds(self) -> float:
        """Return the time in seconds; this waits until the device has reached its end."""
        if self._events is None:
            return self._end - self._start
        start, end = self._events
        end.synchronize()
        return start.elapsed_time(end) / 1000
