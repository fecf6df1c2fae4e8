"""The verifier on every family, with conditioning and sizes as a user of the script gets them, and on LoRA layers."""

from __future__ import annotations

import pytest
import torch

from hf_bucketing import PackingError
from hf_bucketing.models import VerificationReport, enable_packing, verify_packing
from hf_bucketing.models.families.flux2 import Flux2Family
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import packed_forward
from hf_bucketing.packing.attachment import unwrap
from tests.conftest import run_script_here
from tests.models.cases import Samples, largest_difference
from tests.models.families import CASES, each_kin

peft = pytest.importorskip("peft")
LORA = peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)


def verify(model: torch.nn.Module, *samples: int, references: int = 0) -> VerificationReport:
    """Verify some of the samples that a model is tried out with, of text lengths 5, 1, 1, 1 where they may differ.

    The last one has the size of the first as that many references.
    """
    verified, model = model, unwrap(model)
    family = family_of(model)
    grids = [family.trial_grids(model)[sample] for sample in samples]
    sides = [[side * part for side, part in zip(grid, family.patch(model.config), strict=True)] for grid in grids]
    lengths = [family.text_length(model.config) or (5 if sample == 0 else 1) for sample in samples]
    shown = [*[[]] * (len(samples) - 1), sides[:1] * references]
    torch.manual_seed(0)  # Kandinsky 5 rounds to bfloat16 inside, at which rare differences in rounding grow
    return verify_packing(
        verified,
        [torch.randn(family.in_channels(model), *size) for size in sides],
        timesteps=torch.rand(len(samples)) * 1000,
        text=[torch.randn(length, family.text_dim(model)) for length in lengths],
        references=[[torch.randn(family.in_channels(model), *size) for size in grids] for grids in shown],
        strip_length=4,
    )


@each_kin
def test_every_family_passes(name: str) -> None:
    model = CASES[name].model()
    with CASES[name].on_cpu():
        report = verify(model, 0, 3)
    assert report.passed, str(report)
    by_frame = [check.name for check in report.checks if check.name == "outputs, a timestep per frame"]
    assert (len(report.checks), len(by_frame)) == ((7, 0) if family_of(model).timesteps_per == "row" else (8, 1))


@pytest.mark.parametrize(("name", "references"), [
    ("flux", 1), ("flux.2", 2), ("qwen-image", 2), ("qwen-image clean condition", 2), ("ltx", 2), ("ltx2.3", 2),
])  # fmt: skip
def test_references_are_verified_too(name: str, references: int) -> None:
    report = verify(CASES[name].model(), 0, 3, references=references)
    assert report.passed, str(report)


def test_references_in_another_place_fail_the_outputs_and_a_family_that_takes_none_refuses_them(monkeypatch) -> None:
    original = Flux2Family.reference_positions
    monkeypatch.setattr(
        Flux2Family, "reference_positions", lambda *args, **options: (original(*args, **options)[0].flip(0),)
    )
    failed = [check.name for check in verify(CASES["flux.2"].model(), 0, 3, references=2).checks if not check.holds]
    assert failed[:3] == ["outputs, packed against alone", "loss", "gradients, relative"]
    assert not any("leak" in name for name in failed)
    with pytest.raises(PackingError, match="WanTransformer3DModel takes none"):
        verify(CASES["wan"].model(), 0, 3, references=1)


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


@pytest.mark.parametrize(("name", "checks", "line"), [
    ("pixart conditioned", 7, "(1, 4, 6), (1, 8, 4), (1, 3, 3), (1, 1, 1)"),
    ("cogvideox-learned", 7, "(3, 5, 6), (1, 5, 6), (5, 5, 6), (1, 5, 6)"),
    ("wan image", 8, "(3, 4, 6), (1, 8, 4), (5, 3, 3), (1, 1, 1)"),
    ("wan-vace", 7, "(3, 4, 6), (1, 8, 4), (5, 3, 3), (1, 1, 1)"),
    ("flux", 7, "References of the samples: 0, 1, 1, 1"),
    ("ltx2", 8, "References of the samples: 0, 1, 2, 3"),
])  # fmt: skip
def test_the_script_verifies_a_model_at_sizes_and_with_texts_that_it_takes(name, checks, line, tmp_path) -> None:
    CASES[name].model().save_pretrained(tmp_path / "transformer")
    result = run_script_here("verify_packing.py", tmp_path, "--text_length", 5, "--strip_length", 4)
    assert result.stdout.count("  holds") == checks
    assert line in result.stdout
