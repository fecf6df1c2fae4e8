"""Notebooks run from top to bottom, and store what such a run shows."""

from __future__ import annotations

from base64 import b64decode
from io import BytesIO
from pathlib import Path

import nbformat
import pytest
from PIL import Image

from tests.conftest import ROOT, run_script

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@notebooks
def test_notebooks_are_stored_after_a_whole_run(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}, "no error"
    assert "stderr" not in {output.get("name") for output in outputs}, "no warnings"
    assert "image/png" in outputs[-1].get("data", {}), "a notebook ends in a picture"
    assert cells[-1].outputs[-1] == outputs[-1], "of its last cell"
    text = path.read_text()
    assert not [word for word in ("/tmp/", "/home/", "/root/", "iopub") if word in text], "nothing of the machine"
    assert len(text) < 400_000


def test_the_notebook_of_fine_tuning_ends_in_a_clip() -> None:
    *_, last = nbformat.read(ROOT / "notebooks" / "03_finetune.ipynb", as_version=4).cells
    with Image.open(BytesIO(b64decode(last.outputs[-1].data["image/png"]))) as picture:
        assert getattr(picture, "n_frames", 1) > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem.startswith("03") else pytest.mark.every) for path in NOTEBOOKS],
    ids=lambda path: path.name,
)
def test_notebooks_run_and_store_the_texts_of_that_run(path: Path) -> None:
    run_script("tools/update_notebooks.py", path, "--check")


@notebooks
def test_notebooks_need_the_package_alone_and_store_no_progress_bars(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert not [word for cell in cells for word in ("sys.path", "scripts", "tests", "!pip") if word in cell.source]
    for output in (output for cell in cells for output in cell.outputs):
        assert not [form for form in output.get("data", {}) if "widget" in form]
        shown = output.get("text", "") + output.get("data", {}).get("text/plain", "")
        assert not [sign for sign in ("\r", "it/s", "s/it", "%|", "█") if sign in shown]
