"""scripts/tools/update_docs.py writes figures and tables of JSON files into Markdown, between markers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_script_here

FIGURES = {
    "fill": 0.8431,
    "whole": 1,
    "shares": [{"buckets": 6250, "full": 0.5}, {"buckets": 3, "full": 1.0}],
    "rows": [{"way": "pack", "fill": 0.97, "steps": 1200}, {"way": "pad", "fill": None, "steps": 9}],
    "uneven": [{"a": 1}, {"b": 2}],
}
OUTDATED = """Packs fill <!-- figure: a.json fill .1% -->?<!-- end -->
and <!-- figure: a.json fill -->?<!-- end --> of <!-- figure: a.json whole .0% -->?<!-- end -->.
<!-- table: a.json shares .1% -->old<!-- end -->
<!-- table: a.json rows .2f -->old<!-- end -->
"""
UPDATED = """Packs fill <!-- figure: a.json fill .1% -->84.3%<!-- end -->
and <!-- figure: a.json fill -->0.843<!-- end --> of <!-- figure: a.json whole .0% -->100%<!-- end -->.
<!-- table: a.json shares .1% -->

| buckets | full |
| ---: | ---: |
| 6,250 | 50.0% |
| 3 | 100.0% |

<!-- end -->
<!-- table: a.json rows .2f -->

| way | fill | steps |
| --- | ---: | ---: |
| pack | 0.97 | 1,200 |
| pad | – | 9 |

<!-- end -->
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of the script, a page and a file of figures."""
    (tmp_path / "scripts" / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "scripts" / "tools").mkdir()
    shutil.copy(ROOT / "scripts" / "tools" / "update_docs.py", tmp_path / "scripts" / "tools")
    (tmp_path / "scripts" / "benchmarks" / "results" / "a.json").write_text(json.dumps(FIGURES))
    (tmp_path / "README.md").write_text("No figures.\n")
    monkeypatch.setattr("tests.conftest.ROOT", tmp_path)
    return tmp_path


def test_figures_and_tables_are_written_from_json(repository: Path) -> None:
    page = repository / "docs" / "page.md"
    page.write_text(OUTDATED)
    stale = run_script_here("tools/update_docs.py", "--check", check=False)
    assert stale.returncode == 1
    assert "docs/page.md" in stale.stderr
    assert page.read_text() == OUTDATED
    run_script_here("tools/update_docs.py")
    assert page.read_text() == UPDATED
    run_script_here("tools/update_docs.py", "--check")


@pytest.mark.parametrize(
    "marker", ["figure: a.json none", "figure: b.json fill", "figure: a.json rows", "table: a.json uneven"]
)
def test_what_is_not_there_is_an_error(marker: str, repository: Path) -> None:
    (repository / "README.md").write_text(f"<!-- {marker} --><!-- end -->")
    failed = run_script_here("tools/update_docs.py", check=False)
    assert failed.returncode == 1
    assert failed.stderr
