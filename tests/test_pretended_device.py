"""What the pretended device says of operations is what a GPU says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_bucketing.devices import Reading, to_device
from tests.devices import Device

NUMBER = torch.tensor(2.0)
WAITING = {
    "a number in an element": lambda values, device: values.__setitem__(0, 5),
    "a number in elements by their indices": lambda values, device: values.__setitem__(values.long() % 3, 5.0),
    "a tensor from a list": lambda values, device: values.new_tensor([1.0, 2.0]),
    "a tensor from a list there": lambda values, device: torch.tensor([1.0, 2.0], device=device),
    "elements by a list": lambda values, device: values[[0, 2]],
    "elements by indices on the CPU": lambda values, device: values[torch.tensor([0, 2])],
    "elements by a mask": lambda values, device: values[values > 1],
    "places of a mask": lambda values, device: values.nonzero(),
    "a choice by a number on the CPU": lambda values, device: torch.where(values > 1, values, NUMBER),
    "filling by a number of the device": lambda values, device: values.masked_fill(values > 1, values.sum()),
    "a number": lambda values, device: values.sum().item(),
    "a condition": lambda values, device: bool(values.sum() > 1),
    "numbers": lambda values, device: values.tolist(),
    "a copy to the CPU": lambda values, device: values.cpu(),
    "a copy from the CPU": lambda values, device: torch.ones(4).to(device),
    "a copy into it from the CPU": lambda values, device: values.copy_(torch.ones(4)),
    "repeats that are not summed": lambda values, device: values.repeat_interleave(values.long()),
    "a comparison": lambda values, device: torch.equal(values, values + 1),
    "an event": lambda values, device: Reading(values).values(),
}
LAUNCHED = {
    "a number in elements": lambda values, device: values.__setitem__(slice(1, 3), 5),
    "a number by a mask": lambda values, device: values.__setitem__(values > 1, 5.0),
    "a number of the device in an element": lambda values, device: values.__setitem__(0, values.sum()),
    "arithmetic with numbers": lambda values, device: (values * NUMBER + 1).clamp(min=0.5),
    "a choice by a number": lambda values, device: torch.where(values > 1, values, 2.0),
    "filling": lambda values, device: values.masked_fill(values > 1, 2.0).fill_(NUMBER),
    "full ones": lambda values, device: values.new_full((2,), 3.0) + torch.full((2,), 3.0, device=device),
    "elements by indices": lambda values, device: values[values.long()],
    "repeats that are summed": lambda values, device: values.repeat_interleave(values.long(), output_size=6),
    "a copy that does not wait": lambda values, device: to_device(torch.ones(4), device),
    "a copy there": lambda values, device: values.double().clone(),
}
"""Operations on values from 0 to 3, those that wait for their device and those that do not."""


@pytest.mark.parametrize(
    ("operation", "waiting"),
    [pytest.param(run, waits, id=name) for kind, waits in ((WAITING, 1), (LAUNCHED, 0)) for name, run in kind.items()],
)
def test_operations_that_wait_are_recorded(
    device: Device, operation: Callable[[torch.Tensor, torch.device], Any], waiting: int
) -> None:
    values = device.move(torch.arange(4.0))
    with device.recording() as waits:
        operation(values, device.device)
    assert min(waits.total(), 1) == waiting
    file = "hf_bucketing/devices.py:" if "event" in "".join(waits) else "tests/test_pretended_device.py:"
    assert all(line.startswith(file) for lines in waits.lines.values() for line in lines)


def test_a_wait_that_is_not_named_fails_with_its_line(device: Device) -> None:
    values = device.move(torch.arange(4.0))
    with device.recording() as waits:
        values.cpu()
    with pytest.raises(AssertionError, match=r"waits at tests/test_pretended_device\.py:\d+"):
        waits.check({"copy to the CPU in tests/test_pretended_device.py:another"})
    waits.check(
        {"copy to the CPU in tests/test_pretended_device.py:test_a_wait_that_is_not_named_fails_with_its_line"}
    )
