"""Every family in float64: a pack against the same samples run one by one through the stock model."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig

from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.registry import families
from hf_bucketing.packing import packed_forward
from tests.models.cases import Samples, assert_same_gradients, gradients, largest_difference, packed_outputs
from tests.models.families import CASES

each_family = pytest.mark.parametrize("name", CASES)
OUTPUTS, GRADIENTS = 1e-11, 1e-6


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
def test_a_saved_and_loaded_model_runs_the_same_packs(name: str, tmp_path: Path) -> None:
    model, samples, outputs, _ = alone(name)
    packed = copy.deepcopy(model)
    enable_packing(packed, strip_length=4)
    packed.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, torch_dtype=torch.float64).to(torch.float64)
    expected = samples.alone(loaded)  # diffusers loads some modules of Wan, its positions too, in float32
    assert_equal(expected, packed_outputs(loaded, samples, strip_length=7))
    assert largest_difference(outputs, expected) < 1e-5
    disable_packing(packed)
    assert all(torch.equal(one, other) for one, other in zip(outputs, samples.alone(packed), strict=True))


@each_family
@torch.no_grad()
def test_adapters_take_part(name: str) -> None:
    model, samples, outputs, _ = alone(name)
    model = copy.deepcopy(model)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False))
    model.to(torch.float64)
    expected = samples.alone(model)
    assert max(float((one - other).abs().max()) for one, other in zip(outputs, expected, strict=True)) > 1e-6
    assert_equal(expected, packed_outputs(model, samples))
