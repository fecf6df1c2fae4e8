"""Every family that packing knows: a pack against the same samples run one by one through the stock model."""

from __future__ import annotations

import torch

from hf_bucketing.models import enable_packing
from hf_bucketing.packing import packed_forward, use_layout
from tests.models.cases import (
    FamilyCase,
    Samples,
    assert_same_gradients,
    each_family,
    gradients,
    largest_difference,
    packed_outputs,
)


@each_family
def test_the_dense_backend_computes_the_same(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    loss = samples.loss_packed(model, enable_packing(model, strip_length=4, backend="dense"))
    assert abs(float(loss.detach()) - case.expected.loss) <= 1e-5
    packed = gradients(model, loss)
    assert_same_gradients(case.expected.gradients, packed, 1e-4, without_gradient=case.without_gradient)


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
def test_people_may_drive_the_forward_themselves(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    packing = enable_packing(model, strip_length=4)
    batch = samples.pack(packing)
    with use_layout(batch.layout):
        output = model(**packing.family.inputs(packing.family.rows(batch)), return_dict=False)[0]
    assert torch.equal(packing.family.output_strips(batch, output), packed_forward(model, batch))
