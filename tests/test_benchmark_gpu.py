"""The benchmark for GPUs runs, small and without one, so that it does not fail there for a typo."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.conftest import ROOT, run, run_script_here


@pytest.fixture
def benchmark(monkeypatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("benchmark_gpu")


def run_here(output: Path, **settings: object) -> dict[str, Any]:
    run_script_here("benchmark_gpu.py", small=True, runs=1, output=output, **settings)
    return json.loads(output.read_text())


@pytest.mark.slow
def test_packing_is_measured_small_and_drawn(tmp_path: Path) -> None:
    figures = run_here(
        tmp_path / "gpu.json",
        parts=["parity", "attention", "step", "reading", "strategies"],
        figure=tmp_path / "gpu.png",
    )
    parts = figures["parts"]
    for case in (parts["parity"]["attention"], parts["parity"]["model"]):
        assert "needs a CUDA device" in case["varlen"]["not_run"] or torch.cuda.is_available()
        errors = case["segments"]
        assert 0 < errors["output_relative_error"] < 0.02, "bf16 has 8 bits"
        assert 0 < errors["gradients_relative_error"] < 0.02
    for case in ("one", "mixed"):
        assert parts["attention"][case]["segments"]["forward_backward_of_flash_throughput"] > 0
    step = parts["step"]
    assert step["packed_tokens"] == step["fixed_size_tokens"]
    assert step["packed_pairs_of_tokens"] == pytest.approx(step["fixed_size_pairs_of_tokens"], rel=0.2)
    assert step["lora"]["packed_of_fixed_size_tokens_per_s"] > 0
    assert step["full"]["packed_of_fixed_size_tokens_per_s"] > 0
    assert parts["reading"]["short"].keys() == {"default_before_s", "fused_before_s", "fused_later_s"}
    assert all(seconds > 0 for name in ("short", "mixed") for seconds in parts["reading"][name].values())
    strategies = parts["strategies"]
    assert {strategies[name]["samples"] for name in ("padding", "bucketing", "packing")} == {strategies["samples"]}
    assert all(parts[name]["seconds"] > 0 for name in parts)
    with Image.open(tmp_path / "gpu.png") as image:
        assert len(image.convert("RGB").getcolors(10**6)) > 20


def test_steps_of_the_real_sizes_have_equal_tokens_and_pairs_and_no_sample_of_the_set_is_rejected(benchmark) -> None:
    for scale, tolerance in ((benchmark.FULL, 0.005), (benchmark.SMALL, 0.2)):
        counts = [[frames * rows * columns for frames, rows, columns in step]
                  for step in (scale.mixed_step, scale.fixed_step)]  # fmt: skip
        assert sum(counts[0]) == pytest.approx(sum(counts[1]), rel=tolerance)
        squares = [sum(count**2 for count in step) for step in counts]
        assert squares[0] == pytest.approx(squares[1], rel=tolerance)
        sizes = scale.mixed_set()
        for epoch in (benchmark.padded, benchmark.bucketed, benchmark.packed):
            batches = epoch(scale, sizes)
            assert sum(map(len, batches)) == len(sizes)
        for batch in benchmark.packed(scale, sizes):
            assert sum(map(scale.spec.num_tokens, batch)) <= scale.max_tokens


@pytest.mark.slow
def test_a_part_that_runs_out_of_memory_or_comes_too_late_does_not_lose_the_others(
    benchmark, tmp_path: Path, monkeypatch
) -> None:
    def runs_out(scale: object, runs: int) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore.")

    monkeypatch.setattr(benchmark, "PARTS", {"full": runs_out, "fits": lambda scale, runs: {"ratio": 1.0}})
    parser = benchmark.make_parser()
    output = tmp_path / "gpu.json"
    benchmark.main(parser.parse_args(["--parts", "full", "fits", "--output", str(output)]))
    parts = json.loads(output.read_text())["parts"]
    assert parts["full"]["out_of_memory"] == "CUDA out of memory. Tried to allocate 20.00 GiB."
    assert parts["fits"]["ratio"] == 1.0
    late = ["--parts", "fits", "--max_minutes", "-1", "--output", str(output)]
    benchmark.main(parser.parse_args(late))
    assert re.search("minutes were over", json.loads(output.read_text())["parts"]["fits"]["not_run"])


@pytest.mark.slow
def test_memory_and_quantisation_are_measured_small(tmp_path: Path) -> None:
    output, packages = tmp_path / "gpu.json", Path(sys.prefix) / "torchao"
    if not packages.is_dir():
        pytest.skip(f"torchao is not in {packages}")
    command = [sys.executable, ROOT / "scripts" / "benchmark_gpu.py", "--small", "--runs", 1, "--output", output]
    path = os.pathsep.join([str(packages), *sys.path])
    run([*command, "--parts", "quantization", "planner"], env={"PYTHONPATH": path})
    figures = json.loads(output.read_text())
    planned = figures["parts"]["planner"]
    assert len(planned) == 8 + 1, "eight settings, and the seconds"
    assert all(case["planned_gib"] > 0 for name, case in planned.items() if name != "seconds")
    assert planned["full, bf16"]["planned_gib"] < planned["full"]["planned_gib"]
    quantized = figures["parts"]["quantization"]
    assert quantized["nf4"] == {"not_run": "needs a GPU"} or torch.cuda.is_available()
    for kind, most in (("int8", 0.02), ("float8", 0.05)):
        assert 0 < quantized[kind]["output_relative_difference"] < most
        assert quantized[kind]["last_loss"] < quantized[kind]["first_loss"], "adapters learn"


@pytest.mark.slow
def test_what_a_gpu_alone_tells_is_asked_for(benchmark, tmp_path: Path, monkeypatch) -> None:
    """The lines that run on a GPU alone run here too, with its counters in place of it."""
    monkeypatch.setattr(benchmark.Scale, "on_gpu", property(lambda scale: True))
    counters = {"synchronize": None, "reset_peak_memory_stats": None, "max_memory_allocated": 3 * 2**30}
    for name, value in {**counters, "memory_allocated": 2**30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(benchmark, "SETTINGS", {"LoRA": benchmark.Setting(), "full": benchmark.Setting(lora=False)})
    flags = ("--small", "--runs", "1", "--parts", "attention", "step", "strategies", "planner")
    output = ("--output", str(tmp_path / "gpu.json"), "--figure", str(tmp_path / "gpu.png"))
    benchmark.main(benchmark.make_parser().parse_args([*flags, *output]))
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert parts["planner"]["full"]["measured_gib"] == 2.0
    assert parts["planner"]["LoRA"]["planned_of_measured"] == parts["planner"]["LoRA"]["planned_gib"] / 2
    assert parts["step"]["lora"]["peak_gib"] == parts["strategies"]["packing"]["peak_gib"] == 3.0
