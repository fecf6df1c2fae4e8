"""The devices that tests compute on: a pretended one, and a GPU with `-m gpu`; the fixture `device` gives both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from tests import pretended_device
from tests.waits import SOME_WAIT, Waits


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device that tests compute on.

    Attributes:
        device (`torch.device`): What tensors on it say.
        move (callable): Returns tensors, also in lists and dictionaries, as they are on the device.
        move_module (callable): Puts the weights and buffers of a module on the device.
        recording (callable): Returns a context in which the device computes, and what waits for it meanwhile.
        rounding (`float`): Relative difference of outputs and losses that rounding may make. With each operation on
            the CPU wrong by up to a bit, it was 8e-4, in the loss of a prediction against nearly the same one.
        gradient_rounding (`float`): That of gradients, see [`assert_same_gradients`]. It was 1.3e-2, of queries and
            keys of text whose tokens are weighted nearly alike, so that what is left of large numbers is small.
    """

    device: torch.device
    move: Callable[[Any], Any]
    move_module: Callable[[torch.nn.Module], torch.nn.Module]
    recording: Callable[[], AbstractContextManager[Waits]]
    rounding: float
    gradient_rounding: float


PRETENDED = Device(
    device=pretended_device.DEVICE,
    move=pretended_device.on_device,
    move_module=pretended_device.module_on_device,
    recording=pretended_device.pretended_device,
    rounding=0.0,
    gradient_rounding=0.0,
)


@contextmanager
def _recording_on_cuda() -> Iterator[Waits]:
    """Yield what waits for CUDA in the package and its tests: torch says where, but not what; events are added.

    The backward pass of what is launched elsewhere waits where that pass is started.
    """
    waits, show = Waits(), warnings.showwarning

    make_event = torch.Event

    class Event:  # not a subclass, whose instances torch refuses to compare
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.event = make_event(*args, **kwargs)

        def record(self) -> None:
            self.event.record()

        def synchronize(self) -> None:
            waits.record("wait for an event", ours=True)
            self.event.synchronize()

        def elapsed_time(self, end: Event) -> float:
            return self.event.elapsed_time(end.event)

    def record(message: Any, *args: Any, **kwargs: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            waits.record(SOME_WAIT, ours=True)
        else:
            show(message, *args, **kwargs)

    with warnings.catch_warnings(), patch.object(torch, "Event", Event):
        warnings.filterwarnings("always", message="called a synchronizing")
        torch.cuda.set_sync_debug_mode("warn")
        warnings.showwarning = record
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _move_to_cuda(value: Any) -> Any:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(CUDA.device, copy=True).requires_grad_(tensor.requires_grad)

    return pretended_device.map_tensors(value, move)


CUDA = Device(
    device=torch.device("cuda", 0),
    move=_move_to_cuda,
    move_module=lambda module: module.to(CUDA.device),
    recording=_recording_on_cuda,
    rounding=1e-3,
    gradient_rounding=2e-2,
)


def on_cpu(value: Any) -> Any:
    """Return tensors, also in lists and dictionaries, as they are on the CPU."""
    return pretended_device.map_tensors(pretended_device.on_cpu(value), lambda tensor: tensor.detach().cpu())


def assert_same_gradients(model: torch.nn.Module, moved: torch.nn.Module, *, limit: float = 1e-4) -> None:
    """Compare the gradients of a model with those of its copy on the device; some are nothing but rounding."""
    there = {name: on_cpu(parameter.grad) for name, parameter in moved.named_parameters()}
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert [name for name, gradient in there.items() if gradient is None] == [
        name for name, gradient in expected.items() if gradient is None
    ]
    known = {name: gradient for name, gradient in expected.items() if gradient is not None}
    whole = float(torch.stack([gradient.norm() for gradient in known.values()]).norm())
    for name, gradient in known.items():
        assert float((there[name] - gradient).norm()) <= limit * max(float(gradient.norm()), 1e-2 * whole), name
