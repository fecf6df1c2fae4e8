"""The package as pip sees it."""

from __future__ import annotations

import configparser
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, made_once, run


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    return made_once(
        tmp_path_factory, "dist", lambda folder: run([sys.executable, "-m", "build", "--outdir", folder, ROOT])
    )


@pytest.mark.slow
def test_the_wheel_holds_all_that_an_import_needs(built: Path, tmp_path: Path) -> None:
    """That setup.cfg names all packages an import needs is tested in test_install.py, in empty environments."""
    (wheel,) = built.glob("*.whl")
    run([sys.executable, "-m", "venv", tmp_path / "venv"])
    python = tmp_path / "venv" / "bin" / "python"
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], env={"PYTHONPATH": ""})
    (site_packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site_packages / "zz_running.pth").write_text(sysconfig.get_path("purelib"))
    code = """
import hf_bucketing, hf_bucketing.columns, hf_bucketing.loaders, hf_bucketing.packing, hf_bucketing.losses
assert "venv" in hf_bucketing.__file__, hf_bucketing.__file__
from hf_bucketing.report.page import Page, render_page
assert "<title>of a wheel</title>" in render_page(Page(title="of a wheel", subtitle="", sections=[]))
print(hf_bucketing.__version__, len(hf_bucketing.novelai_ladder()))
"""
    result = run([python, "-I", "-c", code])
    assert result.stdout.split()[1] == "19"


@pytest.mark.slow
def test_wheel_and_sdist_hold_every_file_of_the_package(built: Path) -> None:
    """Modules and data: templates, weights, `py.typed`."""
    listed = run(["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "hf_bucketing"]).stdout
    tracked = {name for name in listed.splitlines() if (ROOT / name).is_file()}
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert "hf_bucketing/py.typed" in tracked
    assert tracked == {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("hf_bucketing/")}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked | {"LICENSE", "README.md", "pyproject.toml", "setup.cfg"} <= names


def test_the_version_has_one_place() -> None:
    """Packaging reads the version as a literal from the package, without importing it."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["metadata"]["version"] == "attr: hf_bucketing.__version__"
    assert "\n[project]" not in (ROOT / "pyproject.toml").read_text()


def test_the_version_is_the_changelogs_newest() -> None:
    import hf_bucketing

    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert newest.split()[1].strip("[]") == hf_bucketing.__version__
