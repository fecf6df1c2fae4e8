"""A pack is computed on one device, and nothing of it is read back while it is."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_bucketing.models import enable_packing
from hf_bucketing.packing import packed_forward
from tests.packing.packing_cases import CASES, FamilyCase, Samples


class OneDevice(TorchDispatchMode):
    """Refuse operations on tensors of two devices, but for copies between them and single numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device for tensor in tensors if tensor.ndim or tensor.device.type == "meta"}
        assert len(devices) <= 1 or "copy" in str(func), f"{func} on {devices}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_pack_runs_on_one_device_without_reading_from_it(case: FamilyCase) -> None:
    model, samples = case.model().to("meta"), Samples(case=case)  # reading a meta tensor is an error
    samples.latents, samples.text, samples.targets = (
        [tensor.to("meta") for tensor in tensors] for tensors in (samples.latents, samples.text, samples.targets)
    )
    samples.timesteps = samples.timesteps.to("meta")
    samples.conditioning = {name: values.to("meta") for name, values in samples.conditioning.items()}
    packing = enable_packing(model, strip_length=4)
    with OneDevice():
        samples.loss_packed(model, packing).backward()
        batch = samples.pack(packing)
        outputs = batch.unpack(packed_forward(model, batch))
    assert [tuple(output.shape[1:]) for output in outputs] == list(case.sizes)
