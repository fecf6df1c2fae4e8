"""Every family in float64: a pack against the same samples run one by one through the stock model."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.registry import families, family_of
from hf_bucketing.packing import packed_forward
from tests.models.cases import Samples, assert_same_gradients, gradients, in_dtype, packed_outputs
from tests.models.families import CASES

each_family = pytest.mark.parametrize("name", CASES)
OUTPUTS, GRADIENTS = 1e-11, 1e-6
LORA = LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)


class Alone(NamedTuple):
    """A model, its samples, and what these give when they run alone."""

    model: torch.nn.Module
    samples: Samples
    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


@cache
def alone(name: str) -> Alone:
    case = CASES[name]
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case)
    with torch.enable_grad():
        outputs = samples.alone(model)
        values = gradients(model, samples.loss_of(outputs))
    return Alone(model, samples, [output.detach() for output in outputs], values)


def assert_equal(expected: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    for one, other in zip(expected, outputs, strict=True):
        difference, scale = float((one - other).detach().abs().max()), float(one.abs().max())
        assert difference <= OUTPUTS * max(1.0, scale)


def test_every_family_has_a_case() -> None:
    assert {type(case.model()).__name__ for case in CASES.values()} == set(families())


@each_family
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_outputs_and_gradients_are_those_of_the_samples_alone(name: str, checkpointing: bool) -> None:
    model, samples, outputs, expected = alone(name)
    model = copy.deepcopy(model)
    if checkpointing:
        model.enable_gradient_checkpointing()
    packing = enable_packing(model, strip_length=4)
    batch = samples.pack(packing)
    packed = batch.unpack(packed_forward(model, batch))
    assert_equal(outputs, packed)
    found = gradients(model, samples.loss_of(packed))
    assert_same_gradients(expected, found, GRADIENTS, without_gradient=CASES[name].without_gradient)


@each_family
@torch.no_grad()
def test_a_hundred_samples_in_one_pack(name: str) -> None:
    model, _, outputs, _ = alone(name)
    case, order = CASES[name], tuple(i % len(outputs) for i in range(100))
    samples = Samples(torch.float64, case=case, order=order)
    assert_equal([outputs[sample] for sample in order], packed_outputs(copy.deepcopy(model), samples, strip_length=16))


@each_family
@torch.no_grad()
def test_a_copy_and_a_saved_model_run_the_same_packs(name: str, tmp_path: Path) -> None:
    model, samples, outputs, _ = alone(name)
    packed = copy.deepcopy(model)
    packing = enable_packing(packed, strip_length=4)
    batch = samples.pack(packing)
    assert_equal(outputs, batch.unpack(packed_forward(copy.deepcopy(packed), batch)))
    packed.save_pretrained(tmp_path)
    disable_packing(packed)
    assert all(torch.equal(one, other) for one, other in zip(outputs, samples.alone(packed), strict=True))
    loaded = in_dtype(type(model).from_pretrained(tmp_path), torch.float64)
    assert {name: one.shape for name, one in loaded.state_dict().items()} == {
        name: one.shape for name, one in model.state_dict().items()
    }
    assert_equal(samples.alone(loaded), packed_outputs(loaded, samples, strip_length=7))


@each_family
@torch.no_grad()
def test_adapters_take_part(name: str) -> None:
    model, samples, outputs, _ = alone(name)
    adapted = in_dtype(get_peft_model(copy.deepcopy(model), LORA), torch.float64)
    expected = samples.alone(adapted.get_base_model())
    assert max(float((one - other).abs().max()) for one, other in zip(outputs, expected, strict=True)) > 1e-6
    assert_equal(expected, packed_outputs(adapted, samples))


@each_family
@torch.no_grad()
def test_texts_may_come_padded_with_a_mask(name: str) -> None:
    model, samples, outputs, _ = alone(name)
    rule = family_of(model).text_rule
    longest, count = max(map(len, samples.text)), len(samples.text)
    if rule != "masked":
        return  # what the model attends to as padding is part of each text already
    mask = torch.stack([torch.arange(longest + 2) < len(text) for text in samples.text]).long()
    padded = torch.full((count, longest + 2, samples.text[0].shape[1]), 7.0, dtype=torch.float64)
    for row, text in enumerate(samples.text):
        padded[row, : len(text)] = text
    model = copy.deepcopy(model)
    batch = samples.pack(enable_packing(model, strip_length=4), text=padded, text_mask=mask)
    assert_equal(outputs, batch.unpack(packed_forward(model, batch)))
