"""A pack against the same samples one by one: outputs, losses, gradients, leaks, checkpointing."""

from __future__ import annotations

from functools import partial, update_wrapper

import pytest
import torch

from hf_bucketing import PackBatchSampler, PackingError
from hf_bucketing.configuration.batches import BatchConfig
from hf_bucketing.models import enable_packing
from hf_bucketing.packing import packed_forward
from hf_bucketing.plans import PackPlanConfig
from hf_bucketing.report import ReportConfig
from hf_bucketing.streaming import PackGrouping
from tests.models.cases import (
    SIZES,
    Samples,
    assert_same_gradients,
    gradients,
    largest_difference,
    make_model,
)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("strip_length", [1, 4, 7, 64])
def test_outputs_loss_and_gradients_equal_those_of_the_samples_alone(strip_length: int, checkpointing: bool) -> None:
    model, samples = make_model(), Samples()
    if checkpointing:
        model.enable_gradient_checkpointing()
    outputs, loss = samples.alone(model), samples.loss_alone(model)
    expected = gradients(model, loss)
    packing = enable_packing(model, strip_length=strip_length)
    batch = samples.pack(packing)
    assert largest_difference(outputs, batch.unpack(packed_forward(model, batch))) <= 1e-5
    packed_loss = samples.loss_packed(model, packing)
    assert abs(float((packed_loss - loss).detach())) <= 1e-6
    assert_same_gradients(expected, gradients(model, packed_loss), 1e-4)


def test_outputs_agree_in_float64() -> None:
    model, samples = make_model(torch.float64), Samples(torch.float64)
    outputs = samples.alone(model)
    batch = samples.pack(enable_packing(model, strip_length=4))
    assert largest_difference(outputs, batch.unpack(packed_forward(model, batch))) <= 1e-11


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_two_micro_batches_in_flight_keep_their_own_layouts(checkpointing: bool) -> None:
    model = make_model()
    if checkpointing:
        model.enable_gradient_checkpointing()
    first, second = Samples(), Samples(seed=2, order=(5, 3, 0, 2))
    expected = gradients(model, first.loss_alone(model), second.loss_alone(model))
    packing = enable_packing(model, strip_length=4)
    losses = [first.loss_packed(model, packing), second.loss_packed(model, packing)]
    assert_same_gradients(expected, gradients(model, *losses), 1e-4)


def test_checkpointing_that_is_not_bound_to_its_pack_is_an_error_not_a_wrong_gradient() -> None:
    model, samples = make_model(), Samples()
    packing = enable_packing(model, strip_length=4)
    block = model.blocks[0]
    original = block.forward
    by_hand = partial(torch.utils.checkpoint.checkpoint, original, use_reentrant=False)
    block.forward = update_wrapper(by_hand, original)
    loss = samples.loss_packed(model, packing)
    with pytest.raises(PackingError, match="enable_gradient_checkpointing"):
        loss.backward()


@pytest.mark.parametrize("victim", range(len(SIZES)))
def test_nothing_of_a_sample_leaks_into_the_others(victim: int) -> None:
    model, samples = make_model(), Samples()
    packing = enable_packing(model, strip_length=4)

    @torch.no_grad()
    def run() -> list[torch.Tensor]:
        batch = samples.pack(packing)
        return batch.unpack(packed_forward(model, batch))

    before = run()
    samples.latents[victim] = samples.latents[victim] + 100
    samples.text[victim] = samples.text[victim] + 100
    after = run()
    for sample, (output, other) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(output, other) == (sample != victim)


def test_the_order_of_the_samples_does_not_matter() -> None:
    model = make_model()
    packing = enable_packing(model, strip_length=4)
    order = (4, 2, 5, 0, 3, 1)
    batch_in_order, other = (samples.pack(packing) for samples in (Samples(), Samples(order=order)))
    outputs, shuffled = (batch.unpack(packed_forward(model, batch)) for batch in (batch_in_order, other))
    assert largest_difference([outputs[sample] for sample in order], shuffled) <= 1e-5


def test_packs_planned_by_default_hold_max_tokens_in_the_strips_of_a_default_packing() -> None:
    packing, tokens = enable_packing(make_model()), [4] * 10
    sampler = PackBatchSampler(tokens, max_tokens=128, num_processes=1)
    for pack in sampler.plan().batches():
        count = len(pack)
        latents = [torch.zeros(4, 1, 4, 4)] * count
        batch = packing.pack(latents, timesteps=torch.zeros(count), text=[torch.zeros(1, 16)] * count)
        assert batch.layout.lengths == (4,) * count
        assert batch.layout.num_tokens <= 128
    assert PackGrouping(max_tokens=128).measures([{"num_tokens": 4}]) == [64], "the same in packs of a stream"
    for config in (PackPlanConfig(max_tokens=128), ReportConfig(), BatchConfig()):
        assert config.strip_length == packing.strip_length
