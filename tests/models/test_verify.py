"""The verifier: passes on a sound model, fails on each thing that can go wrong, leaves the model as it was."""

from __future__ import annotations

import pytest
import torch

from hf_bucketing import PackingError
from hf_bucketing.models import VerificationReport, enable_packing, verify_packing
from hf_bucketing.models.families.wan import WanFamily
from hf_bucketing.packing import SegmentSpans, attention, strip_positions
from tests.conftest import run_script_here
from tests.models.cases import CASES, Samples, make_model


def verify(model=None, dtype: torch.dtype = torch.float32, **options) -> VerificationReport:
    samples = Samples(dtype)
    return verify_packing(
        make_model(dtype) if model is None else model,
        samples.latents,
        timesteps=samples.timesteps,
        text=samples.text,
        **{"strip_length": 4, **options},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sound_model_passes_every_check(dtype: torch.dtype) -> None:
    report = verify(dtype=dtype)
    assert report.passed, str(report)
    assert len(report.checks) == 8
    assert str(report).count("  holds") == 8


def test_backends_that_mask_are_verified_with_a_finite_poison() -> None:
    report = verify(backend="dense")
    assert report.passed, str(report)
    assert "leak of 1000 into other samples" in str(report)
    assert "leak of nan into other samples" in str(verify())


def test_the_model_is_left_as_it_was() -> None:
    model = make_model()
    processors, before = model.attn_processors, Samples().alone(model)
    verify(model)
    assert model.attn_processors == processors
    assert not model.is_gradient_checkpointing
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(output, other) for output, other in zip(before, Samples().alone(model), strict=True))
    enable_packing(model)
    with pytest.raises(PackingError, match="already enabled"):
        verify(model)


def test_conditioning_is_drawn_the_same_each_time_unless_it_is_given() -> None:
    case = CASES["sd3"]
    samples, model = Samples(case=case), case.model()
    options = {"timesteps": samples.timesteps, "text": samples.text, "strip_length": 4}
    before = torch.get_rng_state()
    drawn, again = (str(verify_packing(model, samples.latents, **options)) for _ in range(2))
    assert drawn == again
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn != str(verify_packing(model, samples.latents, conditioning=samples.conditioning, **options))
    with pytest.raises(PackingError, match=r"needs conditioning \['pooled_projections'\]"):
        verify_packing(model, samples.latents, conditioning={}, **options)
    samples.alone(model)


def failed(report: VerificationReport) -> set[str]:
    return {check.name.partition(",")[0].partition(" of")[0] for check in report.checks if not check.holds}


def test_attention_that_looks_into_other_samples_fails_outputs_gradients_and_leak(monkeypatch) -> None:
    original = attention.packed_attention

    def leaking(query, key, value, segments, **options):
        everything = tuple((0, segments.num_keys) for _ in segments.keys)
        wide = SegmentSpans(queries=segments.queries, keys=everything, num_queries=segments.num_queries,
                            num_keys=segments.num_keys)  # fmt: skip
        return original(query, key, value, wide, **options)

    monkeypatch.setattr("hf_bucketing.packing.attention.dispatch.packed_attention", leaking)
    report = verify()
    assert not report.passed
    assert {"outputs", "gradients", "leak"} <= failed(report)
    assert "FAILED" in str(report)


def test_wrong_positions_fail_the_outputs_but_leak_nothing(monkeypatch) -> None:
    original = strip_positions.position_strips
    monkeypatch.setattr(
        strip_positions, "position_strips", lambda *args: tuple(part.flip(1) for part in original(*args))
    )
    report = verify()
    assert "outputs" in failed(report)
    assert "leak" not in failed(report)


def test_a_timestep_of_another_sample_fails(monkeypatch) -> None:
    original = WanFamily.inputs

    def swapped(self, rows):
        kwargs = original(self, rows)
        return {**kwargs, "timestep": kwargs["timestep"].flip(0)}

    monkeypatch.setattr(WanFamily, "inputs", swapped)
    assert {"outputs", "loss", "gradients"} <= failed(verify())


def test_timesteps_of_another_frame_fail_their_own_check_alone(monkeypatch) -> None:
    original = WanFamily.inputs

    def swapped(self, rows):
        kwargs = original(self, rows)
        by_token = kwargs["timestep"].ndim == 2
        return {**kwargs, "timestep": kwargs["timestep"].flip(0)} if by_token else kwargs

    monkeypatch.setattr(WanFamily, "inputs", swapped)
    failures = [check.name for check in verify().checks if not check.holds]
    assert failures == ["outputs, a timestep per frame"]


def test_frozen_parts_and_learned_variance_are_allowed() -> None:
    model = make_model(out_channels=8)
    model.patch_embedding.requires_grad_(False)
    assert verify(model).passed


def test_the_script_prints_the_table_and_its_exit_code_is_the_verdict(pipeline_dir) -> None:
    result = run_script_here("verify_packing.py", pipeline_dir, "--sizes", "3,2,4", "1,5,2", "--strip_length", 4)
    assert result.stdout.count("  holds") == 8
    result = run_script_here("verify_packing.py", pipeline_dir, "--strip_length", 500, check=False)
    assert result.returncode == 1
    assert "exceeds the 128 positions" in result.stderr.strip().splitlines()[-1]
