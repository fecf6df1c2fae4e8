"""Every family that packing knows: a pack against the same samples run one by one through the stock model."""

from __future__ import annotations

import pytest
import torch

from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.registry import FAMILIES, family_of
from hf_bucketing.packing import packed_forward, use_layout
from tests.packing.packing_cases import (
    CASES,
    FamilyCase,
    Samples,
    assert_same_gradients,
    gradients,
    largest_difference,
)

each_family = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def packed_outputs(model, samples: Samples, *, strip_length: int = 4, **options) -> list[torch.Tensor]:
    """Run the samples packed and disable packing again."""
    packing = enable_packing(model, strip_length=strip_length, **options)
    batch = samples.pack(packing)
    outputs = batch.unpack(packed_forward(model, batch))
    disable_packing(model)
    return outputs


def test_every_family_has_a_case() -> None:
    assert {type(case.model()).__name__ for case in CASES.values()} == set(FAMILIES)


@each_family
def test_the_recipe_runs_a_sample_as_the_stock_model_does(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    family = family_of(model)
    for sample, expected in enumerate(samples.alone(model)):
        output = family.run_alone(
            model,
            samples.latents[sample],
            timestep=samples.timesteps[sample],
            text=samples.text[sample],
            conditioning={name: values[sample] for name, values in samples.conditioning.items()},
        )
        assert float((output - expected).detach().abs().max()) <= 1e-6  # the stock call masks padding, ours has none


@each_family
@pytest.mark.parametrize("strip_length", [4, 7, 64])
def test_outputs_equal_those_of_the_samples_alone(case: FamilyCase, strip_length: int) -> None:
    model, samples = case.model(), Samples(case=case)
    expected = samples.alone(model)
    assert min(float(output.detach().abs().max()) for output in expected) > 0.01
    assert largest_difference(expected, packed_outputs(model, samples, strip_length=strip_length)) <= 1e-5


@each_family
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_loss_and_gradients_equal_those_of_the_samples_alone(case: FamilyCase, checkpointing: bool) -> None:
    model, samples = case.model(), Samples(case=case)
    if checkpointing:
        model.enable_gradient_checkpointing()
    loss = samples.loss_alone(model)
    expected = gradients(model, loss)
    packed_loss = samples.loss_packed(model, enable_packing(model, strip_length=4))
    assert abs(float((packed_loss - loss).detach())) <= 1e-5
    packed = gradients(model, packed_loss)
    assert_same_gradients(expected, packed, 1e-4, without_gradient=case.without_gradient)


@each_family
def test_outputs_agree_in_float64(case: FamilyCase) -> None:
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case)
    limit = 1e-10 if case.float64 else 1e-5
    assert largest_difference(samples.alone(model), packed_outputs(model, samples)) <= limit


@each_family
def test_bfloat16_errs_no_more_than_running_the_samples_alone(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    exact = samples.alone(model)
    with torch.autocast("cpu", torch.bfloat16):
        alone = samples.alone(model)
        packed = packed_outputs(model, samples)
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
@pytest.mark.parametrize("count", [1, 40])
@torch.no_grad()
def test_packs_of_one_and_of_forty_samples(case: FamilyCase, count: int) -> None:
    model = case.model()
    samples = Samples(case=case, order=tuple(i % len(case.sizes) for i in range(count)))
    assert largest_difference(samples.alone(model), packed_outputs(model, samples, strip_length=8)) <= 1e-5


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
