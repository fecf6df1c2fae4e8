"""The verifier on every family, with conditioning and sizes as a user of the script gets them, and on LoRA layers."""

from __future__ import annotations

import pytest
import torch

from hf_bucketing.models import VerificationReport, enable_packing, verify_packing
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import packed_forward
from hf_bucketing.packing.attachment import unwrap
from tests.conftest import run_script_here
from tests.models.cases import Samples, largest_difference
from tests.models.families import CASES

peft = pytest.importorskip("peft")
LORA = peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)
each_family = pytest.mark.parametrize("name", CASES)


def verify(model: torch.nn.Module, *samples: int) -> VerificationReport:
    """Verify some of the samples that a model is tried out with, of text lengths 5, 1, 1, 1 where they may differ."""
    verified, model = model, unwrap(model)
    family = family_of(model)
    grids = [family.trial_grids(model)[sample] for sample in samples]
    sides = [[side * part for side, part in zip(grid, family.patch(model.config), strict=True)] for grid in grids]
    lengths = [family.text_length(model.config) or (5 if sample == 0 else 1) for sample in samples]
    torch.manual_seed(0)  # Kandinsky 5 rounds to bfloat16 inside, at which rare differences in rounding grow
    return verify_packing(
        verified,
        [torch.randn(family.in_channels(model), *size) for size in sides],
        timesteps=torch.rand(len(samples)) * 1000,
        text=[torch.randn(length, family.text_dim(model)) for length in lengths],
        strip_length=4,
    )


@each_family
def test_every_family_passes(name: str) -> None:
    model = CASES[name].model()
    report = verify(model, 0, 3)
    assert report.passed, str(report)
    by_frame = [check.name for check in report.checks if check.name == "outputs, a timestep per frame"]
    assert (len(report.checks), len(by_frame)) == ((7, 0) if family_of(model).timesteps_per == "row" else (8, 1))


@pytest.mark.parametrize("name", ["wan", "sd3"])
def test_lora_wrapped_by_peft_computes_the_same_and_trains_packed(name: str) -> None:
    case = CASES[name]
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
    adapted = CASES["wan"].model()
    adapted.add_adapter(LORA)
    for model in (adapted, peft.get_peft_model(CASES["wan"].model(), LORA)):
        report = verify(model, 0, 1, 3)
        assert report.passed, str(report)


@pytest.mark.parametrize(("name", "checks", "grids"), [
    ("pixart conditioned", 7, "(1, 4, 6), (1, 8, 4), (1, 3, 3), (1, 1, 1)"),
    ("cogvideox-learned", 7, "(3, 5, 6), (1, 5, 6), (5, 5, 6), (1, 5, 6)"),
    ("wan image", 8, "(3, 4, 6), (1, 8, 4), (5, 3, 3), (1, 1, 1)"),
    ("wan-vace", 7, "(3, 4, 6), (1, 8, 4), (5, 3, 3), (1, 1, 1)"),
])  # fmt: skip
def test_the_script_verifies_a_model_at_sizes_and_with_texts_that_it_takes(name, checks, grids, tmp_path) -> None:
    CASES[name].model().save_pretrained(tmp_path / "transformer")
    result = run_script_here("verify_packing.py", tmp_path, "--text_length", 5, "--strip_length", 4)
    assert result.stdout.count(" ok") == checks
    assert grids in result.stdout
