"""The benchmark for GPUs runs, small and without one, so that it does not fail there for a typo."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import ROOT, run, run_script_here


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmarks"))


def module(name: str) -> Any:
    return importlib.import_module(f"gpu_benchmark.{name}")


def run_here(folder: Path, *parts: str, **settings: object) -> dict[str, Any]:
    """Measure parts small, and return the cases of each part's file."""
    run_script_here("benchmarks/benchmark_gpu.py", small=True, runs=1, output_dir=folder, parts=[*parts], **settings)
    return cases_of(folder, *parts)


def cases_of(folder: Path, *parts: str) -> dict[str, Any]:
    files = {part: json.loads((folder / f"{part}.json").read_text()) for part in parts}
    for part, file in files.items():
        assert (file["part"], file["scale"]) == (part, "small")
        assert file["seconds"] > 0
        assert {"device", "date", "torch", "diffusers", "python"} <= set(file)
    return {part: file["cases"] for part, file in files.items()}


BACKENDS = ("auto", "segments", "varlen:fa4", "varlen:torch", "varlen:fa2")


@pytest.mark.every
@pytest.mark.slow
def test_kernels_steps_and_strategies_are_measured_small_and_drawn(tmp_path: Path) -> None:
    parts = ("attention", "steps", "wide_steps", "offload", "reading", "strategies", "parity")
    found = run_here(tmp_path / "gpu", *parts, figure=tmp_path / "gpu.png")
    for cases in (*found["attention"].values(), found["parity"]):
        assert set(cases) - {"stock"} == set(BACKENDS)
        for backend in ("auto", "segments"):
            assert 0 < cases[backend]["output_relative_error"] < 0.02, "bf16 has 8 bits"
            assert 0 < cases[backend]["gradients_relative_error"] < 0.02
        if not torch.cuda.is_available():
            assert all("needs a CUDA device" in cases[backend]["not_run"] for backend in BACKENDS[2:])
    for case in found["attention"].values():
        assert case["auto"]["backend"] == "segments"
        assert all(case["segments"][f"{name}_tflops"] > 0 for name in ("forward", "forward_backward"))
    for part in ("steps", "wide_steps"):
        fixed, mixed = found[part]["fixed, stock"], found[part]["mixed, auto"]
        assert fixed["tokens"] == mixed["tokens"]
        assert fixed["useful_tflops"] > 0 < mixed["useful_tflops"]
        assert fixed["graphs"] == mixed["graphs"] == 0
    losses = {name: case["last_loss"] for name, case in found["offload"].items()}
    assert len(set(losses.values())) == 1, losses
    assert all(len(case) == 3 and min(case.values()) > 0 for case in found["reading"].values())
    samples = module("scale").SMALL.samples
    assert {name: case["samples"] for name, case in found["strategies"].items()} == {
        "padding": samples, "bucketing": samples, "packing": samples,
    }  # fmt: skip
    with Image.open(tmp_path / "gpu.png") as image:
        assert len(image.convert("RGB").getcolors(10**6)) > 20


@pytest.mark.every
@pytest.mark.slow
def test_a_resumed_run_is_compared_and_tests_of_a_device_are_counted(tmp_path: Path) -> None:
    found = run_here(tmp_path, "resume", "tests")
    for case in found["resume"].values():
        assert len(case.get("losses", ())) == 4, case
        assert case["losses_of_the_resumed"] == pytest.approx(case["losses"], abs=1e-6)
    tests = found["tests"]["pytest -m gpu"]
    assert tests["exit_code"] == 0
    assert tests["failures"] == []
    assert tests.get("skipped", 0) + tests.get("passed", 0) > 0, "skipped without a GPU"
    assert "test_offload.py" in (tmp_path / "tests.log").read_text()


def test_outcomes_of_tests_are_read_with_workers_and_without_and_where_a_limit_ended_them() -> None:
    outcomes = module("device_tests").outcomes
    log = (
        "[gw0] [ 50%] PASSED tests/a.py::test_a[cuda-one size] \n[gw3] [ 99%] FAILED tests/b.py::test_b \n"
        "tests/c.py::test_c[cuda 1] PASSED [ 10%]\ntests/c.py::test_d ERROR   [ 20%]\n"
        "tests/c.py::test_e SKIPPED [ 3%]\n"
        "= FAILURES =\ntests/b.py:3: AssertionError\nFAILED tests/b.py::test_b - assert 0\n"
    )
    assert outcomes(log) == {
        "passed": 2, "failed": 1, "error": 1, "skipped": 1, "failures": ["tests/b.py::test_b", "tests/c.py::test_d"],
    }  # fmt: skip
    assert outcomes("[gw0] [ 50%] PASSED tests/a.py::test_a\ntests/b.py::te")["passed"] == 1


@pytest.mark.slow
def test_steps_of_the_real_sizes_have_equal_tokens_and_pairs_and_no_sample_of_the_set_is_rejected() -> None:
    scales, strategies = module("scale"), module("strategies")
    for scale, tolerance in ((scales.FULL, 0.005), (scales.SMALL, 0.2)):
        counts = [[frames * rows * columns for frames, rows, columns in step]
                  for step in (scale.mixed_step, scale.fixed_step)]  # fmt: skip
        assert sum(counts[0]) == pytest.approx(sum(counts[1]), rel=tolerance)
        squares = [sum(count**2 for count in step) for step in counts]
        assert squares[0] == pytest.approx(squares[1], rel=tolerance)
        sizes = scale.mixed_set()
        for epoch in strategies.STRATEGIES.values():
            batches = epoch(scale, sizes)
            assert sum(map(len, batches)) == len(sizes)
        for batch in strategies.packed(scale, sizes):
            assert sum(map(scale.spec.num_tokens, batch)) <= scale.max_tokens


def test_useful_operations_are_those_that_torch_counts() -> None:
    scale, models = module("scale").SMALL, module("models")

    def counted(layers: int) -> int:
        model = models.make_transformer(scale, layers=layers)
        latents, timesteps, text = models.draw(scale, scale.fixed_step)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(torch.stack(latents), timesteps, text, return_dict=False)[0].sum().backward()
        return counter.get_total_flops()

    assert scale.useful_flops(scale.fixed_step, layers=2, frozen=False) == counted(3) - counted(1)


def test_useful_operations_of_published_models() -> None:
    """Both are counted by NVIDIA's Megatron-Bridge (#5249), for 512 tokens of text."""
    scale = module("scale").FULL
    wan_14b = scale.widened().useful_flops(((24, 30, 52),), layers=40, frozen=False)
    assert wan_14b == pytest.approx(6.184e15, rel=0.01)
    wan_1_3b = scale.useful_flops(((21, 30, 52),), layers=30, frozen=False)
    assert wan_1_3b == pytest.approx(0.849e15, rel=0.01)
    frozen = scale.useful_flops(((21, 30, 52),), layers=30, frozen=True)
    assert 2 / 3 < frozen / wan_1_3b < 1, "no gradients of frozen weights, but attention's"


def test_attention_is_measured_with_packs_of_ever_new_lengths() -> None:
    for case in module("scale").SMALL.attention_cases.values():
        packs = [*case.packs(3, device="cpu")]
        lengths = [[stop - start for start, stop in pack.queries] for pack in packs]
        assert len({tuple(pack) for pack in lengths}) == 3
        keys = [case.text_length] * len(case.lengths) if case.text_length else lengths[0]
        pairs = sum(left * right for left, right in zip(lengths[0], keys, strict=True))
        assert case.flops(packs[0]) == 4 * pairs * case.heads * case.head_dim


def test_a_case_that_fails_or_comes_too_late_does_not_lose_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    measuring, kept = module("measuring"), []

    def runs_out() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore.")

    def fails() -> dict[str, Any]:
        raise ValueError("wrong")

    def cases():
        yield "full", runs_out
        yield "wrong", lambda: {"segments": measuring.attempt(fails)}
        yield "fits", lambda: {"ratio": 1.0}
        raise OSError("No space left.")

    figures = measuring.measure(cases, seconds=60, keep=lambda figures: kept.append([*figures]))
    assert figures == {
        "full": {"out_of_memory": "CUDA out of memory. Tried to allocate 20.00 GiB."},
        "wrong": {"segments": {"failed": "ValueError: wrong"}},
        "fits": {"ratio": 1.0},
        "failed": "OSError: No space left.",
    }
    assert kept == [["full"], ["full", "wrong"], ["full", "wrong", "fits"], [*figures]]
    assert measuring.failures({"part": figures}) == ["part", "part / wrong / segments"]
    assert "ValueError: wrong" in capsys.readouterr().err
    late = measuring.measure(cases, seconds=-1, keep=kept.append)
    assert late["fits"] == {"not_run": "-1 seconds were over"}


@pytest.mark.slow
def test_a_failure_is_written_and_ends_the_script_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(scale: object, **_: object) -> None:
        raise ValueError("wrong")

    monkeypatch.setattr(module("parity"), "make_transformer", fails)
    flags = {"small": True, "runs": 1, "output_dir": tmp_path, "parts": ["parity"]}
    result = run_script_here("benchmarks/benchmark_gpu.py", check=False, **flags)
    assert result.returncode == 1
    assert "Some cases failed: parity." in result.stderr
    assert cases_of(tmp_path, "parity")["parity"] == {"failed": "ValueError: wrong"}


@pytest.mark.every
def test_compiled_steps_are_measured_small(tmp_path: Path) -> None:
    cases = run_here(tmp_path, "compiled_steps", part_seconds=600)["compiled_steps"]
    graphs = {name: case["graphs"] for name, case in cases.items()}
    assert graphs["fixed, stock"] == 1
    assert graphs["fixed, auto"] > 0
    assert graphs["small, stock"] == graphs["new packs, auto"] == 0, "sizes share graphs"


@pytest.mark.every
def test_memory_and_quantisation_are_measured_small(tmp_path: Path) -> None:
    packages = Path(sys.prefix) / "torchao"
    if not packages.is_dir():
        pytest.skip(f"torchao is not in {packages}")
    command = [
        sys.executable,
        ROOT / "scripts" / "benchmarks" / "benchmark_gpu.py",
        "--small",
        "--runs",
        1,
        "--output_dir",
        tmp_path,
    ]
    path = os.pathsep.join([str(packages), *sys.path])
    run([*command, "--parts", "quantization", "memory"], env={"PYTHONPATH": path})
    found = cases_of(tmp_path, "quantization", "memory")
    planned = {name: case["planned_gib"] for name, case in found["memory"].items()}
    assert planned.keys() == module("memory").SETTINGS.keys()
    assert 0 < planned["full, bf16"] < planned["full"]
    quantized = found["quantization"]
    assert quantized["nf4"] == {"not_run": "needs a GPU"} or torch.cuda.is_available()
    for kind, most in (("int8", 0.02), ("float8", 0.05)):
        assert 0 < quantized[kind]["output_relative_difference"] < most
        assert quantized[kind]["last_loss"] < quantized[kind]["first_loss"], "adapters learn"


@pytest.mark.slow
def test_what_a_gpu_alone_tells_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines that run on a GPU alone run here too, with its counters in place of it."""
    monkeypatch.setattr(module("scale").Scale, "on_gpu", property(lambda scale: True))
    counters = {"synchronize": None, "reset_peak_memory_stats": None, "max_memory_allocated": 3 * 2**30}
    for name, value in {**counters, "memory_allocated": 2**30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    setting = module("memory").Setting
    monkeypatch.setattr(module("memory"), "SETTINGS", {"LoRA": setting(), "full": setting(lora=False)})
    found = run_here(tmp_path, "attention", "steps", "strategies", "memory", figure=tmp_path / "gpu.png")
    assert found["memory"]["full"]["measured_gib"] == 2.0
    assert found["memory"]["LoRA"]["planned_of_measured"] == found["memory"]["LoRA"]["planned_gib"] / 2
    assert found["steps"]["mixed, auto"]["peak_gib"] == found["strategies"]["packing"]["peak_gib"] == 3.0
