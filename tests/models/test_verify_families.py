"""The verifier on every family, and on models with LoRA layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_bucketing.models import disable_packing, enable_packing, verify_packing
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import packed_forward
from tests.conftest import run_script_here
from tests.packing.packing_cases import CASES, FamilyCase, Samples, largest_difference

each_family = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
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
def test_lora_wrapped_by_peft_passes_and_trains_packed(case: FamilyCase) -> None:
    samples = Samples(case=case, order=(0, 1, 3))
    model = peft.get_peft_model(case.model(), LORA)
    report = verify(model, samples)
    assert report.passed, str(report)
    packing = enable_packing(model, strip_length=4)
    samples.loss_packed(model, packing).backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    disable_packing(model)


def test_an_adapter_of_diffusers_passes() -> None:
    case = CASES["wan"]
    model, samples = case.model(), Samples(case=case, order=(0, 1, 3))
    before = samples.alone(model)
    model.add_adapter(LORA)
    assert largest_difference(before, samples.alone(model)) > 1e-4
    report = verify(model, samples)
    assert report.passed, str(report)


@pytest.mark.parametrize("name", ["ltx", "pixart conditioned", "wan first and last", "cosmos"])
def test_drawn_conditioning_is_what_the_model_needs(name: str) -> None:
    case = CASES[name]
    model, samples = case.model(), Samples(case=case, order=(0, 1))
    family, packing = family_of(model), enable_packing(model, strip_length=4)
    samples.conditioning = family.draw_conditioning(model, [(1, 2, 3), (1, 4, 2)])
    assert torch.isfinite(packed_forward(model, samples.pack(packing))).all()


def test_the_script_verifies_a_family_with_conditioning_and_other_sizes(tmp_path) -> None:
    model = CASES["pixart conditioned"].model()
    model.save_pretrained(tmp_path / "transformer")
    result = run_script_here("verify_packing.py", tmp_path, "--text_length", 5, "--strip_length", 4)
    assert result.stdout.count(" ok") == 7
    assert "(1, 4, 6), (1, 8, 4)" in result.stdout
