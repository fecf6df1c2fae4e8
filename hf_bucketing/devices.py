"""Copies to a device that do not wait for what the device still computes."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor on a device, which by default has its dtype.

    A plain copy from the CPU waits until the device has done all that was started before. This one does not: CUDA
    reads the tensor before the call returns. MPS may read it later, so there the copy is a plain one, and so it is to
    the CPU, which would not have the values yet.
    """
    waits = tensor.device.type != "cpu" or torch.device(device).type == "mps"
    return tensor.to(device, dtype=dtype, non_blocking=not waits)
