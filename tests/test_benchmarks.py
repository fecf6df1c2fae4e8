"""The benchmarks run, small, and leave their figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import run_script

SMALL = {
    "mapping": ("--rows", 20_000, "--files", 8, "--header_files", 8, "--prepared_rows", 2000),
    "sampling": ("--rows", 20_000, "--samples", 5000, "--draws", 2, "--scale_rows", 10_000, "--scale_processes", 8),
    "lengths": ("--items", 5000),
    "packing": ("--layers", 1, "--heads", 2),
    "training": ("--images", 2, "--side", 32, "--samples", 12, "--workers", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_benchmarks_measure(name: str, tmp_path: Path) -> None:
    run_script(f"benchmark_{name}.py", *SMALL[name], "--runs", 1, "--output", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    ratios = [value for key, value in figures.items() if "times_" in key]
    assert ratios
    assert all(ratio > 0 for ratio in ratios)
    results = Path(__file__).parent.parent / "scripts" / "benchmark_results" / f"{name}.json"
    measured = {key for key in json.loads(results.read_text()) if not key.startswith(("lhotse", "scale"))}
    missing = measured - set(figures) - {"length_times_faster_than_lhotse"}
    assert not missing, "what the repository reports is still measured"
