"""A pack is computed on one device, and the CPU never waits for that device while it is."""

from __future__ import annotations

import pytest
import torch

from hf_bucketing.models import enable_packing
from hf_bucketing.packing import packed_forward, packed_mse
from tests.models.cases import Samples
from tests.models.families import CASES
from tests.pretended_device import assert_same_gradients, module_on_device, on_cpu, on_device, pretended_device

COPIED = "copy to the device in transformers/"
STOCK_WAITS = {
    f"{COPIED}transformer_chroma.py:forward": "counts the modulations of its blocks",
    f"{COPIED}transformer_kandinsky.py:forward": "multiplies timesteps by a table that it keeps on the CPU",
    f"{COPIED}transformer_ltx2.py:prepare_video_coords": "makes the positions of a size, once",
    f"{COPIED}transformer_lumina2.py:_get_freqs_cis": "makes the positions of a size, once, and of the strips",
    f"{COPIED}transformer_qwenimage.py:_get_device_freqs": "moves its table of positions, once",
    f"{COPIED}transformer_qwenimage.py:forward": "marks tokens that have no noise",
    f"{COPIED}transformer_skyreels_v2.py:forward": "takes frame rates as a list",
    f"{COPIED}transformer_z_image.py:<listcomp>": "moves its tables of positions, once",
    "tolist in hunyuan_video_15/packing.py:_image_lengths": "zeros in the place of an image are no image",
}
"""All that waits in packs, and why: copies to the device in diffusers' own forwards, and one read of ours.

That read is needed where there are image embeddings, some of which may be zeros: a pack's layout depends on them.
"""
ON_CPU = {"encoder_attention_mask_2", "fps"}
"""Conditioning that recipes give on the CPU: masks, and frame rates that the model takes as numbers."""


def step(model: torch.nn.Module, samples: Samples) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run a forward and a backward of a pack; return the outputs of its samples and their loss."""
    batch = samples.pack(enable_packing(model, strip_length=4))
    prediction = packed_forward(model, batch)
    loss = packed_mse(prediction, batch.pack_like(samples.targets), batch.layout).mean()
    loss.backward()
    return batch.unpack(prediction), loss


@pytest.mark.parametrize("name", CASES)
def test_a_pack_runs_on_a_device_without_waiting_for_it(name: str) -> None:
    case = CASES[name]
    model, moved, samples = case.model(), module_on_device(case.model()), Samples(case=case)
    outputs, loss = step(model, samples)
    samples.latents, samples.text, samples.targets, samples.timesteps = on_device(
        (samples.latents, samples.text, samples.targets, samples.timesteps)
    )
    samples.conditioning = {
        name: values if name in ON_CPU else on_device(values) for name, values in samples.conditioning.items()
    }
    with pretended_device() as waits:
        outputs_there, loss_there = step(moved, samples)
    assert set(waits) <= STOCK_WAITS.keys()
    assert float(on_cpu(loss_there.detach())) == pytest.approx(float(loss.detach()), rel=1e-6)
    for output, output_there in zip(outputs, on_cpu(outputs_there), strict=True):
        assert torch.allclose(output_there, output, atol=1e-5, rtol=1e-5)
    assert_same_gradients(model, moved)
