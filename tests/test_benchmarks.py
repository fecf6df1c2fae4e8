"""The benchmarks run, small, and leave their figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import run_script

SMALL = {
    "mapping": ("--rows", 20_000, "--files", 8, "--header_files", 8, "--prepared_rows", 2000),
    "sampling": (
        *("--rows", 20_000, "--epoch_rows", 5000, "--epoch_runs", 1, "--processes", 1, "--samples", 5000),
        *("--scale_rows", 10_000, "--scale_processes", 8),
    ),
    "lengths": ("--rows", 5000, "--lazy_rows", 500, "--duration_rows", 5000, "--processes", 1),
    "packing": ("--layers", 1, "--heads", 2),
    "training": ("--images", 2, "--side", 32, "--samples", 12, "--workers", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_benchmarks_measure(name: str, tmp_path: Path) -> None:
    run_script(f"benchmark_{name}.py", *SMALL[name], "--runs", 1, "--output", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    results = Path(__file__).parent.parent / "scripts" / "benchmark_results" / f"{name}.json"
    measured = {key for key in json.loads(results.read_text()) if not key.startswith(("lhotse", "scale"))}
    assert not measured - set(figures), "what the repository reports is still measured"
    for key, figure in figures.items():
        assert not isinstance(figure, float) or key.startswith("load") or figure >= 0
        assert not isinstance(figure, list) or [[*row] for row in figure] == [[*figure[0]]] * len(figure), "tables"
