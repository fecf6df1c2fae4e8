"""Backends, token drop and fixed numbers of strips, where text rides in the strips."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.packing import TokenDrop, packed_forward
from hf_bucketing.packing.strips import to_strips
from tests.models.joint_cases import JOINT_CASES
from tests.packing.packing_cases import CASES, Samples, assert_same_gradients, gradients, largest_difference
from tests.packing.test_compile import Graphs

each_joint = pytest.mark.parametrize("case", [CASES[name] for name in JOINT_CASES], ids=JOINT_CASES)


@each_joint
@pytest.mark.parametrize("backend", ["segments", "dense"])
def test_backends_compute_the_same(case, backend: str) -> None:
    model, samples = case.model(), Samples(case=case)
    expected = gradients(model, samples.loss_alone(model))
    actual = gradients(model, samples.loss_packed(model, enable_packing(model, strip_length=4, backend=backend)))
    assert_same_gradients(expected, actual, 1e-4, without_gradient=case.without_gradient)


@each_joint
@torch.no_grad()
def test_a_fixed_number_of_strips_changes_nothing(case) -> None:
    model, samples = case.model(), Samples(case=case)
    packing = enable_packing(model, strip_length=4)
    given = {"timesteps": samples.timesteps, "text": samples.text, "conditioning": samples.conditioning}
    batch, padded = packing.pack(samples.latents, **given), packing.pack(samples.latents, pad_to=120, **given)
    assert (batch.layout.num_rows < 120, padded.layout.num_rows, len(padded.strips)) == (True, 120, 120)
    fixed = packing.pack(samples.latents, pad_to=120, pad_text_to=480, **given)
    assert fixed.layout.joint.text_slots == 4
    outputs = [one.unpack(packed_forward(model, one)) for one in (batch, padded, fixed)]
    assert largest_difference(outputs[0], outputs[1]) <= 1e-5
    assert largest_difference(outputs[0], outputs[2]) <= 1e-5
    for pad_to, pad_text_to in ((None, 480), (120, 500), (120, 0)):
        with pytest.raises(PackingError, match="multiple of pad_to"):
            packing.pack(samples.latents, pad_to=pad_to, pad_text_to=pad_text_to, **given)


@pytest.mark.parametrize("name", ["cogvideox", "cogvideox-1.5", "cogvideox-sincos", "hunyuan"])
@torch.no_grad()
def test_a_video_whose_last_frames_are_dropped_is_a_shorter_one(name: str) -> None:
    case = CASES[name]
    model, samples = case.model(), Samples(case=case, order=(0, 1, 2))
    packing = enable_packing(model, strip_length=4)
    batch = samples.pack(packing)
    kept = tuple(torch.arange(h * w) for _, h, w in batch.layout.grids)
    layout = replace(batch.layout, kept=kept)
    dropped = replace(batch, strips=to_strips(samples.latents, batch.patch, layout=layout), layout=layout)
    outputs = dropped.unpack(packed_forward(model, dropped))
    disable_packing(model)
    frames = batch.patch[0]
    samples.latents = [latent[:, :frames] for latent in samples.latents]
    assert largest_difference(samples.alone(model), [output[:, :frames] for output in outputs]) <= 1e-5


@each_joint
def test_tokens_are_dropped_in_training(case) -> None:
    model, samples = case.model().train(), Samples(case=case)
    packing = enable_packing(model, strip_length=4)
    given = {"timesteps": samples.timesteps, "text": samples.text, "conditioning": samples.conditioning}
    batch = packing.pack(samples.latents, token_drop=TokenDrop(rate=0.5), seeds=range(len(samples.latents)), **given)
    whole = packing.pack(samples.latents, **given)
    for few, all_of_them in zip(batch.layout.lengths, whole.layout.lengths, strict=True):
        assert 1 <= few < max(all_of_them, 2)
    prediction = packed_forward(model, batch)
    assert torch.isfinite(prediction).all()
    assert prediction.shape[0] == batch.layout.num_rows <= whole.layout.num_rows


@pytest.mark.parametrize("name", ["sd3.5", "cogvideox", "hunyuan", "flux"])
@torch.no_grad()
def test_packs_of_one_shape_need_no_further_graph(name: str) -> None:
    torch._dynamo.reset()
    case, graphs = CASES[name], Graphs()
    single = {"num_single_layers": 1} if name in ("hunyuan", "flux") else {}
    model = case.model(num_layers=1, **single)
    packing = enable_packing(model, strip_length=4, backend="dense")
    compiled = torch.compile(model, backend=graphs)
    counts = []
    for seed, order in enumerate([(0, 1), (5, 3, 2, 2), (4,), (1, 2, 3, 4, 5), (3, 3, 3), (0, 5, 1), (2, 4, 0, 1)]):
        samples = Samples(case=case, seed=seed, order=order)
        given = {"timesteps": samples.timesteps, "text": samples.text, "conditioning": samples.conditioning}
        batch = packing.pack(samples.latents, pad_to=120, pad_text_to=480, **given)
        assert largest_difference([packed_forward(compiled, batch)], [packed_forward(model, batch)]) <= 1e-6
        counts.append(graphs.count)
    assert 0 < counts[-1] <= counts[1] + 2
    torch._dynamo.reset()
