"""A pack is computed on one device, and the CPU never waits for that device while it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.media import frame_rates
from hf_bucketing.models import enable_packing
from hf_bucketing.packing import Packing, packed_forward, packed_mse
from tests.devices import Device, assert_same_gradients, on_cpu
from tests.models.cases import Samples
from tests.models.families import CASES, each_kin
from tests.pretended_device import DEVICE, on_device, pretended_device

COPIED = "copy to the device in transformers/"
STOCK_WAITS = {
    f"{COPIED}transformer_chroma.py:forward": "counts the modulations of its blocks",
    f"{COPIED}transformer_kandinsky.py:forward": "multiplies timesteps by a table that it keeps on the CPU",
    f"{COPIED}transformer_qwenimage.py:forward": "marks tokens that have no noise",
    f"{COPIED}transformer_skyreels_v2.py:forward": "takes frame rates as a list",
    "tolist in families/hunyuan.py:_image_lengths": "zeros in the place of an image are no image",
}
"""All that waits in packs, and why: copies to the device in diffusers' own forwards, and one read of ours.

That read is needed where there are image embeddings, some of which may be zeros: a pack's layout depends on them.
"""
FIRST_WAITS = {
    f"{COPIED}transformer_chronoedit.py:forward": "takes positions by a list of their indices",
    f"{COPIED}transformer_ltx2.py:prepare_video_coords": "makes the positions of a size",
    f"{COPIED}transformer_qwenimage.py:_get_device_freqs": "moves its table of positions",
    f"{COPIED}transformer_wan_animate_2.py:_rope_freqs": "moves its tables of positions",
    f"{COPIED}transformer_z_image.py:__call__": "moves its tables of positions",
}
"""What waits once beside that: in the first pack, or in the first with samples of a size."""
_QWEN_21 = "in transformers/transformer_qwenimage21.py"
WAITS_OF = {
    "qwen-image-2.1": {
        f"aten._local_scalar_dense.default {_QWEN_21}:forward": "counts the tokens of text",
        f"aten.index_put_.default {_QWEN_21}:forward": "puts tokens where a mask says",
        "aten.index.Tensor in packing/test_packing_devices.py:step": "the backward of that",
        "aten.index_put.default in packing/test_packing_devices.py:step": "the backward of that",
        f"aten.nonzero.default {_QWEN_21}:build_token_metadata": "finds the tokens of images",
        f"aten.repeat_interleave.Tensor {_QWEN_21}:forward": "makes room for tokens",
        f"copy to the device in {_QWEN_21[3:]}:build_token_metadata": "numbers the images",
        f"copy to the device in {_QWEN_21[3:]}:forward": "moves its tables of positions, and makes those of rows",
        f"tolist {_QWEN_21}:_qwenimage21_prefix_segments": "finds where text begins and ends",
        f"tolist {_QWEN_21}:forward": "makes the positions of rows",
    }
}
"""What else waits in the stock forward of single models, whatever packing passes."""
ON_CPU = {"encoder_attention_mask_2", "fps", "prior_token_drop"}
"""Conditioning that recipes give on the CPU: masks, and frame rates that the model takes as numbers."""


def step(model: torch.nn.Module, samples: Samples, packing: Packing) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run a forward and a backward of a pack; return the outputs of its samples and their loss."""
    batch = samples.pack(packing)
    prediction = packed_forward(model, batch)
    loss = packed_mse(prediction, batch.pack_like(samples.targets), batch.layout).mean()
    loss.backward()
    return batch.unpack(prediction), loss


def test_the_pretended_device_refuses_and_records_what_a_real_one_would() -> None:
    values, mask = on_device(torch.arange(4.0)), torch.tensor([True, False, True, False])
    with pretended_device() as waits:
        doubled = (values * 2.0)[torch.tensor([3, 1]).to(DEVICE, non_blocking=True)]
        with pytest.raises(RuntimeError, match="all tensors on one device"):
            values + torch.ones(4)
        with pytest.raises(TypeError, match="cannot become an array"):
            np.asarray(values)
        assert not waits
        assert float(doubled.sum()) == 8.0
        values[on_device(mask)], values.cpu(), values.tolist(), torch.ones(4).to(DEVICE)
    here = "in packing/test_packing_devices.py:test_the_pretended_device_refuses_and_records_what_a_real_one_would"
    whats = (
        "aten._local_scalar_dense.default",
        "aten.index.Tensor",
        "copy to the CPU",
        "tolist",
        "copy to the device",
    )
    assert waits == dict.fromkeys((f"{what} {here}" for what in whats), 1)


def test_frame_rates_are_checked_where_that_waits_for_no_device() -> None:
    with pretended_device() as waits:
        assert on_cpu(frame_rates([24.0, 0.0], device=DEVICE)).tolist() == [24.0, 1.0]
        assert on_cpu(frame_rates(on_device(torch.tensor([24.0, 0.0])))).tolist() == [24.0, 1.0]
        with pytest.raises(BucketingError, match="frame rate of 0 or more"):
            frame_rates([24.0, -1.0], device=DEVICE)
    assert not waits


LIMITS = {"kandinsky5": 1e-2}
"""Relative differences where they are not the default: Kandinsky rotates in bf16, where processors round otherwise."""


@each_kin
def test_a_pack_runs_on_a_device_without_waiting_for_it(device: Device, name: str) -> None:
    case = CASES[name]
    model, moved, samples = case.model(), device.move_module(case.model()), Samples(case=case)
    outputs, loss = step(model, samples, enable_packing(model, strip_length=4))
    samples.latents, samples.text, samples.targets, samples.timesteps = device.move(
        (samples.latents, samples.text, samples.targets, samples.timesteps)
    )
    samples.conditioning = {
        name: values if name in ON_CPU else device.move(values) for name, values in samples.conditioning.items()
    }
    packing = enable_packing(moved, strip_length=4)
    with device.recording() as waits:
        outputs_there, loss_there = step(moved, samples, packing)
        always = STOCK_WAITS.keys() | WAITS_OF.get(name, {}).keys()
        waits.check(always | FIRST_WAITS.keys())
        waits.clear()
        with torch.no_grad():
            packed_forward(moved, samples.pack(packing))
        waits.check(always)
    limit = max(LIMITS.get(name, 1e-6), device.rounding)
    assert float(on_cpu(loss_there.detach())) == pytest.approx(float(loss.detach()), rel=limit)
    for output, output_there in zip(outputs, on_cpu(outputs_there), strict=True):
        assert (output_there - output).norm() <= max(limit, 1e-5) * output.norm()
    assert_same_gradients(model, moved, limit=max(LIMITS.get(name, 1e-4), device.gradient_rounding))
