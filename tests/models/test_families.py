"""Every family that packing knows: a pack against the same samples run one by one through the stock model."""

from __future__ import annotations

import pytest
import torch

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.registry import families, family_of
from hf_bucketing.packing import TokenDrop, packed_forward, use_layout
from tests.models.cases import (
    CASES,
    FamilyCase,
    Samples,
    assert_same_gradients,
    each_family,
    gradients,
    largest_difference,
    packed_outputs,
)


def test_every_family_has_a_case() -> None:
    assert {type(case.model()).__name__ for case in CASES.values()} == set(families())


@each_family
@torch.no_grad()
def test_the_family_runs_a_sample_as_the_stock_model_does(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    family = family_of(model)
    for sample, expected in enumerate(case.expected.outputs):
        output = family.run_alone(
            model,
            samples.latents[sample],
            timestep=samples.timesteps[sample],
            text=samples.text[sample],
            conditioning={name: values[sample] for name, values in samples.conditioning.items()},
        )
        assert float((output - expected).abs().max()) <= 1e-6  # the stock call masks padding, ours has none


@each_family
@torch.no_grad()
def test_outputs_equal_those_of_the_samples_alone_in_strips_of_any_length(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    assert min(float(output.abs().max()) for output in case.expected.outputs) > 0.01
    for strip_length in (4, 7, 64):
        packed = packed_outputs(model, samples, strip_length=strip_length)
        assert largest_difference(case.expected.outputs, packed) <= 1e-5, strip_length
    if type(model).__name__ == "AllegroTransformer3DModel":
        with pytest.raises(PackingError, match="strip_length of at least 2"):
            enable_packing(model, strip_length=1)
    else:
        assert largest_difference(case.expected.outputs, packed_outputs(model, samples, strip_length=1)) <= 1e-5


@each_family
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_loss_and_gradients_equal_those_of_the_samples_alone(case: FamilyCase, checkpointing: bool) -> None:
    model, samples = case.model(), Samples(case=case)
    if checkpointing:
        model.enable_gradient_checkpointing()
    loss = samples.loss_packed(model, enable_packing(model, strip_length=4))
    assert abs(float(loss.detach()) - case.expected.loss) <= 1e-5
    packed = gradients(model, loss)
    assert_same_gradients(case.expected.gradients, packed, 1e-4, without_gradient=case.without_gradient)


@each_family
def test_the_dense_backend_computes_the_same(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    loss = samples.loss_packed(model, enable_packing(model, strip_length=4, backend="dense"))
    assert abs(float(loss.detach()) - case.expected.loss) <= 1e-5
    packed = gradients(model, loss)
    assert_same_gradients(case.expected.gradients, packed, 1e-4, without_gradient=case.without_gradient)


@each_family
@torch.no_grad()
def test_outputs_agree_in_float64(case: FamilyCase) -> None:
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case)
    limit = 1e-10 if case.float64 else 1e-5
    assert largest_difference(samples.alone(model), packed_outputs(model, samples)) <= limit


@each_family
@torch.no_grad()
def test_autocast_errs_no_more_than_running_the_samples_alone(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    with torch.autocast("cpu", torch.bfloat16):
        alone = samples.alone(model)
        packed = packed_outputs(model, samples)
    exact = case.expected.outputs
    assert 0 < largest_difference(exact, packed) <= 2 * largest_difference(exact, alone)


@each_family
@torch.no_grad()
def test_a_model_in_bfloat16_errs_no_more_than_running_the_samples_alone(case: FamilyCase) -> None:
    exact, model, samples = case.expected.outputs, case.model(torch.bfloat16), Samples(torch.bfloat16, case=case)
    alone, packed = samples.alone(model), packed_outputs(model, samples)
    assert {output.dtype for output in packed} == {torch.bfloat16}
    assert 0 < largest_difference(exact, packed) <= 2 * largest_difference(exact, alone)


@each_family
@torch.no_grad()
def test_a_nan_leaks_into_no_other_sample(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    before = packed_outputs(model, samples)
    for victim in range(len(samples.latents)):
        poisoned = Samples(case=case)
        poisoned.latents[victim] = poisoned.latents[victim] * torch.nan
        poisoned.text[victim] = poisoned.text[victim] * torch.nan
        for sample, (one, other) in enumerate(zip(before, packed_outputs(model, poisoned), strict=True)):
            assert torch.equal(one, other) == (sample != victim)


@each_family
@torch.no_grad()
def test_packs_of_one_and_of_forty_samples(case: FamilyCase) -> None:
    model = case.model()
    for count in (1, 40):
        order = tuple(i % len(case.sizes) for i in range(count))
        packed = packed_outputs(model, Samples(case=case, order=order), strip_length=8)
        assert largest_difference([case.expected.outputs[sample] for sample in order], packed) <= 1e-5, count


@each_family
@torch.no_grad()
def test_a_fixed_shape_changes_nothing(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    packing = enable_packing(model, strip_length=4)
    own = samples.pack(packing).layout
    slots = own.text_slots + 1 if own.text_slots else 0
    strips = own.num_strips + 3
    fixed = {"pad_to": strips, "pad_text_to": slots * strips if slots else sum(case.text_lengths) + 5}
    batch = samples.pack(packing, **fixed)
    assert (batch.layout.num_strips, len(batch.strips), batch.layout.text_slots) == (strips, strips, slots)
    assert slots or len(batch.text) == fixed["pad_text_to"]
    assert largest_difference(case.expected.outputs, batch.unpack(packed_forward(model, batch))) <= 1e-5


@each_family
@torch.no_grad()
def test_dropped_tokens_are_missing_and_the_others_keep_their_positions(case: FamilyCase) -> None:
    model = case.model().train()
    packing = enable_packing(model, strip_length=4)

    def run(*order: int) -> list[torch.Tensor]:
        batch = Samples(case=case, order=order).pack(packing, token_drop=TokenDrop(rate=0.4), seeds=order)
        return batch.unpack(packed_forward(model, batch))

    if not packing.family.drops_tokens:
        with pytest.raises(PackingError, match="token_drop"):
            run(0, 1)
        return
    together = run(*range(len(case.sizes)))
    for sample, output in enumerate(together):
        assert largest_difference([output], run(sample)) <= 1e-5
    dropped = together[0].abs().sum(0) == 0
    assert 0 < dropped.float().mean() < 1
    assert largest_difference([together[0][:, ~dropped]], [case.expected.outputs[0][:, ~dropped]]) > 1e-4


@each_family
def test_two_packs_in_flight_keep_their_own_layouts(case: FamilyCase) -> None:
    model = case.model()
    model.enable_gradient_checkpointing()
    both = Samples(case=case, order=(0, 1)), Samples(case=case, order=(5, 3))
    expected = gradients(model, *[samples.loss_alone(model) for samples in both])
    packing = enable_packing(model, strip_length=4)
    losses = [samples.loss_packed(model, packing) for samples in both]
    assert_same_gradients(expected, gradients(model, *losses), 1e-4, without_gradient=case.without_gradient)


@each_family
@torch.no_grad()
def test_the_model_stays_the_stock_one_and_comes_back_bit_for_bit(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    cls, keys, before = type(model), model.state_dict().keys(), samples.alone(model)
    processors = [module.processor for module in model.modules() if hasattr(module, "set_processor")]
    enable_packing(model, strip_length=4)
    assert type(model) is cls
    assert cls.__module__.startswith("diffusers.")
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.state_dict().keys() == keys
    disable_packing(model)
    assert [module.processor for module in model.modules() if hasattr(module, "set_processor")] == processors
    assert all(torch.equal(one, other) for one, other in zip(before, samples.alone(model), strict=True))


@each_family
@torch.no_grad()
def test_people_may_drive_the_forward_themselves(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    packing = enable_packing(model, strip_length=4)
    batch = samples.pack(packing)
    with use_layout(batch.layout):
        own = model(**packing.family.forward_kwargs(batch), return_dict=False)[0]
    assert torch.equal(packing.family.output_strips(batch, own), packed_forward(model, batch))


@each_family
@torch.no_grad()
def test_conditioning_can_be_drawn_to_try_a_model_out(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case, order=(0, 1))
    packing = enable_packing(model, strip_length=4)
    needed, grids = samples.conditioning, samples.pack(packing).layout.grids
    samples.conditioning = packing.family.draw_conditioning(model, grids)
    assert samples.conditioning.keys() == needed.keys()
    assert torch.isfinite(packed_forward(model, samples.pack(packing))).all()
