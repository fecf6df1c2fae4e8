"""The package as pip sees it."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import ROOT, run


@pytest.mark.slow
def test_the_wheel_holds_all_that_an_import_needs(tmp_path: Path) -> None:
    """That setup.cfg names all packages an import needs is tested in test_install.py, in empty environments."""
    run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", ROOT])
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run([sys.executable, "-m", "venv", tmp_path / "venv"])
    python = tmp_path / "venv" / "bin" / "python"
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel])
    (site_packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site_packages / "zz_running.pth").write_text(sysconfig.get_path("purelib"))
    code = """
import pathlib
import hf_bucketing, hf_bucketing.columns, hf_bucketing.loaders, hf_bucketing.packing, hf_bucketing.losses
assert "venv" in hf_bucketing.__file__, hf_bucketing.__file__
assert (pathlib.Path(hf_bucketing.__file__).parent / "py.typed").exists()
from hf_bucketing.report.page import Page, render_page
assert "<title>of a wheel</title>" in render_page(Page(title="of a wheel", subtitle="", sections=[]))
print(hf_bucketing.__version__, len(hf_bucketing.novelai_ladder()))
"""
    result = run([python, "-I", "-c", code])
    assert result.stdout.split()[1] == "19"


def test_the_version_is_the_changelogs_newest() -> None:
    import hf_bucketing

    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert newest.split()[1].strip("[]") == hf_bucketing.__version__
