"""The tables of docs/benchmarks/h100.md are those of the files that were measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.conftest import ROOT

RESULTS = ROOT / "scripts" / "benchmarks" / "results"


def test_tables_follow_from_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmarks"))
    tables = importlib.import_module("gpu_benchmark.h100").tables()
    assert json.loads((RESULTS / "h100.json").read_text()) == json.loads(json.dumps(tables))


@pytest.mark.parametrize("path", sorted((RESULTS / "h100").glob("*.json")), ids=lambda path: path.stem)
def test_every_file_names_machine_versions_and_date(path: Path) -> None:
    described = json.loads(path.read_text())
    named = (
        "date",
        "session",
        "device",
        "driver",
        "python",
        "torch",
        "cudnn",
        "triton",
        "diffusers",
        "peft",
        "flash_attn_4",
    )
    assert all(described[name] for name in named)
    assert described["measured"]
    assert {"1": 1, "2": 2, "3": 3}.get(path.stem.split("_fa4")[0].rstrip("abc")[-1], 2) == described["session"]
