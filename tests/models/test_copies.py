"""Copies of a transformer with packing enabled: an EMA copy, a distillation teacher, a saved model."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from diffusers.training_utils import EMAModel
from peft import LoraConfig

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.packing import packed_forward
from tests.models.cases import CASES, FamilyCase, Samples, each_family, largest_difference


def saved_and_loaded(model: torch.nn.Module) -> torch.nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@each_family
@pytest.mark.parametrize("make_copy", [copy.deepcopy, saved_and_loaded], ids=["deepcopy", "saved"])
@torch.no_grad()
def test_a_copy_is_packed_by_itself(case: FamilyCase, make_copy) -> None:
    model, samples = case.model(), Samples(case=case)
    batch = samples.pack(enable_packing(model, strip_length=4))
    expected, other = packed_forward(model, batch), make_copy(model)
    for parameter in model.parameters():
        parameter.zero_()
    assert torch.equal(packed_forward(other, batch), expected), "positions come from the copy too"
    disable_packing(other)
    assert largest_difference(case.expected.outputs, samples.alone(other)) <= 1e-5
    packed_forward(model, batch)
    with pytest.raises(PackingError, match="no pack is being computed"):
        samples.alone(model)
    disable_packing(model)
    samples.alone(model)


@torch.no_grad()
def test_an_ema_copy_of_a_lora_runs_packs() -> None:
    case = CASES["wan"]
    model, samples = case.model(), Samples(case=case)
    model.add_adapter(LoraConfig(target_modules=["to_q", "to_v"], init_lora_weights=False))
    batch = samples.pack(enable_packing(model, strip_length=4))
    average, expected = EMAModel(model.parameters(), decay=0.0), packed_forward(model, batch)
    teacher = copy.deepcopy(model)
    for parameter in teacher.parameters():
        parameter.zero_()
    average.copy_to(teacher.parameters())
    assert torch.equal(packed_forward(teacher, batch), expected)
    disable_packing(teacher)
    assert torch.equal(packed_forward(model, batch), expected)
