"""The benchmarks run, small, and leave their figures."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_script_here

RESULTS = ROOT / "scripts" / "benchmarks" / "results"

SMALL = {
    "mapping": {"rows": 10_000, "files": 4, "header_files": 4, "chosen_rows": 2000, "prepared_rows": 1000},
    "sampling": {
        "rows": 20_000,
        "epoch_rows": 5000,
        "epoch_runs": 1,
        "processes": 1,
        "samples": 5000,
        "scale_rows": 10_000,
        "scale_processes": 8,
    },
    "lengths": {"rows": 5000, "lazy_rows": 500, "duration_rows": 5000, "processes": 1},
    "packing": {"layers": 1, "heads": 2, "shrink": 4},
    "saving": {"layers": 1},
    "preservation": {"samples": 6, "steps": 1, "inference_steps": 1},
    "references": {"samples": 12, "side": 64, "epoch_side": 64, "layers": 1, "heads": 1},
    "training": {"images": 2, "side": 16, "samples": 6, "workers": 0},
}
LONG = ("lengths", "mapping", "preservation", "sampling", "saving")
"""Benchmarks that take ten to forty seconds also when they are small, many of them to start processes."""
YARDSTICKS = {"open_sora": 2000, "knapformer": 2, "videosys": 400, "durations": 600}


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize("name", YARDSTICKS)
def test_yardsticks_measure_and_draw(name: str, tmp_path: Path) -> None:
    files = ("--output", tmp_path / "figures.json", "--figure", tmp_path / "figure.png")
    run_script_here(f"benchmarks/benchmark_{name}.py", "--samples", YARDSTICKS[name], *files)
    figures = json.loads((tmp_path / "figures.json").read_text())
    reported = json.loads((RESULTS / f"{name}.json").read_text())
    assert list(figures) == list(reported)
    tables = [key for key, value in reported.items() if isinstance(value, list)]
    assert tables
    for key in tables:
        assert [list(row) for row in figures[key]] == [list(row) for row in reported[key]]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.every
@pytest.mark.slow
def test_chosen_tables_keep_no_less_than_those_of_k_means(tmp_path: Path) -> None:
    run_script_here("benchmarks/benchmark_tables.py", "--samples", 300, "--output", tmp_path / "figures.json")
    reported, figures = (json.loads(file.read_text()) for file in (RESULTS / "tables.json", tmp_path / "figures.json"))
    assert list(figures) == list(reported)
    for table in ("few_buckets", "beside_ladders"):
        assert [list(row) for row in figures[table]] == [list(figures[table][0])] * len(figures[table])
        assert list(figures[table][0]) == list(reported[table][0])
        for row in (*figures[table], *reported[table]):
            assert row["chosen, %"] >= row["k-means, %"] - 1e-9
            assert row["chosen, %"] >= row.get("ladder, %", 0) - 1e-9


def test_drawn_clips_last_as_long_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmarks"))
    data_sets = importlib.import_module("published_data_sets").DATA_SETS
    for data in data_sets.values():
        seconds, frames, heights, widths = data.draw(5000, fps=16)
        assert seconds.mean() == pytest.approx(data.mean_seconds, rel=0.05)
        assert data.bounds[0] <= seconds.min() <= seconds.max() <= data.bounds[1]
        assert (frames <= seconds * 16).all()
        assert {*zip(heights.tolist(), widths.tolist(), strict=True)} == set(data.sizes)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.every if name in LONG else pytest.mark.slow) for name in SMALL]
)
def test_benchmarks_measure(name: str, tmp_path: Path) -> None:
    run_script_here(f"benchmarks/benchmark_{name}.py", runs=1, output=tmp_path / "figures.json", **SMALL[name])
    figures = json.loads((tmp_path / "figures.json").read_text())
    results = RESULTS / f"{name}.json"
    measured = {key for key in json.loads(results.read_text()) if not key.startswith(("lhotse", "scale"))}
    assert not measured - set(figures), "what the repository reports is still measured"
    for key, figure in figures.items():
        assert not isinstance(figure, float) or key.startswith("load") or figure >= 0
        assert not isinstance(figure, list) or [[*row] for row in figure] == [[*figure[0]]] * len(figure), "tables"


def test_figures_of_parts_that_are_not_measured_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmarks"))
    measure_parts = importlib.import_module("benchmark_tools").measure_parts
    measures = {"a": lambda: {"first": 1.0}, "b": lambda: {"second": 2.0}}
    file = tmp_path / "figures.json"
    measure_parts(measures, ["a", "b"], {"numpy": "1"}, file)
    whole = json.loads(file.read_text())
    assert {**whole, "load_at_end": 0} == {"numpy": "1", "first": 1.0, "second": 2.0, "load_at_end": 0}
    measure_parts({**measures, "b": lambda: {"second": 3.0}}, ["b"], {"numpy": "2"}, file)
    assert json.loads(file.read_text()) == {**whole, "second": 3.0}
    measure_parts(measures, ["b"], {"numpy": "2"}, tmp_path / "other.json")
    assert set(json.loads((tmp_path / "other.json").read_text())) == {"numpy", "second", "load_at_end"}
