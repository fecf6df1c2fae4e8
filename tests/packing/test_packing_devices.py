"""A pack is computed on one device, and nothing of it is read back while it is."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_bucketing.models import enable_packing
from hf_bucketing.packing import packed_forward, packed_mse
from tests.models.cases import FamilyCase, Samples, each_family


class OneDevice(TorchDispatchMode):
    """Refuse operations on tensors of two devices, but for copies between them and single numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device for tensor in tensors if tensor.ndim or tensor.device.type == "meta"}
        assert len(devices) <= 1 or "copy" in str(func), f"{func} on {devices}"
        return func(*args, **(kwargs or {}))


@each_family
def test_a_pack_runs_on_one_device_without_reading_from_it(case: FamilyCase) -> None:
    model, samples = case.model().to("meta"), Samples(case=case)  # reading a meta tensor is an error
    samples.latents, samples.text, samples.targets = (
        [tensor.to("meta") for tensor in tensors] for tensors in (samples.latents, samples.text, samples.targets)
    )
    samples.timesteps = samples.timesteps.to("meta")
    samples.conditioning = {name: values.to("meta") for name, values in samples.conditioning.items()}
    packing = enable_packing(model, strip_length=4)
    with OneDevice():
        batch = samples.pack(packing)
        prediction = packed_forward(model, batch)
        packed_mse(prediction, batch.pack_like(samples.targets), batch.layout).mean().backward()
        outputs = batch.unpack(prediction)
    assert [tuple(output.shape[1:]) for output in outputs] == list(case.sizes)
