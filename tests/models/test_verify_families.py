"""The verifier on every family, and on models with LoRA layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_bucketing.models import enable_packing, verify_packing
from hf_bucketing.packing import packed_forward
from tests.conftest import run_script_here
from tests.models.cases import CASES, FamilyCase, Samples, each_family, largest_difference
from tests.models.families import CASES as FAMILIES

peft = pytest.importorskip("peft")
LORA = peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)


def verify(model: torch.nn.Module, samples: Samples) -> Any:
    return verify_packing(
        model,
        samples.latents,
        timesteps=samples.timesteps,
        text=samples.text,
        conditioning=samples.conditioning,
        strip_length=4,
    )


@each_family
def test_every_family_passes(case: FamilyCase) -> None:
    report = verify(case.model(), Samples(case=case, order=(0, 1, 3)))
    assert report.passed, str(report)
    assert len(report.checks) == 7


@each_family
def test_lora_wrapped_by_peft_computes_the_same_and_trains_packed(case: FamilyCase) -> None:
    samples = Samples(case=case, order=(0, 1, 3))
    model = peft.get_peft_model(case.model(), LORA)
    with torch.no_grad():
        expected = samples.alone(model.get_base_model())
    assert largest_difference([case.expected.outputs[sample] for sample in (0, 1, 3)], expected) > 1e-4
    batch = samples.pack(enable_packing(model, strip_length=4))
    prediction = packed_forward(model, batch)
    assert largest_difference(expected, batch.unpack(prediction)) <= 1e-5
    prediction.square().mean().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)


def test_adapters_of_peft_and_of_diffusers_pass() -> None:
    case = CASES["wan"]
    samples, adapted = Samples(case=case, order=(0, 1, 3)), case.model()
    adapted.add_adapter(LORA)
    for model in (adapted, peft.get_peft_model(case.model(), LORA)):
        report = verify(model, samples)
        assert report.passed, str(report)


def test_the_script_verifies_a_family_with_a_control_video(tmp_path) -> None:
    FAMILIES["wan-vace"].model().save_pretrained(tmp_path / "transformer")
    result = run_script_here("verify_packing.py", tmp_path, "--text_length", 5, "--strip_length", 4)
    assert result.stdout.count(" ok") == 7


def test_the_script_verifies_a_family_with_conditioning_and_other_sizes(tmp_path) -> None:
    model = CASES["pixart conditioned"].model()
    model.save_pretrained(tmp_path / "transformer")
    result = run_script_here("verify_packing.py", tmp_path, "--text_length", 5, "--strip_length", 4)
    assert result.stdout.count(" ok") == 7
    assert "(1, 4, 6), (1, 8, 4)" in result.stdout
