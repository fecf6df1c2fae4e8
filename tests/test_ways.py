"""The picture of the four ways of batching shows what the library does today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import ROOT, run_script

COMMITTED = ROOT / "scripts" / "benchmarks" / "results" / "ways.json"


@pytest.mark.slow
def test_the_committed_figures_are_those_of_the_picture_that_is_drawn(tmp_path: Path) -> None:
    run_script("benchmarks/draw_ways.py", "--figure", tmp_path / "ways.png", "--output", tmp_path / "ways.json")
    drawn, committed = (json.loads(path.read_text()) for path in (tmp_path / "ways.json", COMMITTED))
    counted = ("squares_lost", "padding", "buckets_lost", "packed_fill", "sequences_packed", "batches", "tokens")
    assert [drawn[name] for name in counted] == [pytest.approx(committed[name]) for name in counted]
    assert (tmp_path / "ways.png").stat().st_size < 200_000
    sizes = [Image.open(path).size for path in (tmp_path / "ways.png", ROOT / "docs" / "figures" / "ways.png")]
    assert sizes[0] == sizes[1]
