"""Times and values that are read from a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_bucketing.configuration.batches import LoaderConfig
from hf_bucketing.devices import DeviceTimer, Reading


class Event:
    """An event of a device that reaches its first event at 100 ms and the second at 350 ms."""

    made = 0

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert device.type == "cuda"
        assert enable_timing
        Event.made += 1
        self.place, self.calls = Event.made, ""

    def record(self) -> None:
        self.calls += "record "

    def synchronize(self) -> None:
        self.calls += "synchronize "

    def elapsed_time(self, end: Event) -> float:
        assert (self.calls, end.calls) == ("record ", "record synchronize ")
        return 250.0 * (end.place - self.place)


def test_a_device_notes_its_times_itself(monkeypatch) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    timer = DeviceTimer(torch.device("cuda"))
    timer.stop()
    assert timer.seconds() == 0.25


def test_the_cpu_has_the_time_of_the_program(monkeypatch) -> None:
    ticks = iter([1.0, 1.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    timer = DeviceTimer(torch.device("cpu"))
    timer.stop()
    assert timer.seconds() == 0.5


def test_tensors_are_read_as_they_are() -> None:
    tensors = [torch.tensor(3.0), torch.arange(6.0).reshape(2, 3), torch.empty(0)]
    assert [tensor.tolist() for tensor in Reading(*tensors).values()] == [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize(("device", "pinned"), [("cuda", True), ("cpu", False)])
def test_batches_for_a_gpu_lie_in_pinned_memory(device: str, pinned: bool, monkeypatch) -> None:
    state: Any = SimpleNamespace(device=torch.device(device))
    monkeypatch.setattr("accelerate.PartialState", lambda: state)
    assert LoaderConfig(dataloader_num_workers=0).options() == {"timeout": 0, "pin_memory": pinned, "num_workers": 0}
