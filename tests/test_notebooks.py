"""Notebooks run from top to bottom, and are stored without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import HANG_GUARD, ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@notebooks
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    for cell in code_cells(nbformat.read(path, as_version=4)):
        assert not cell.outputs, cell.source
        assert cell.execution_count is None, cell.source


@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.name, marks=[] if path.name == "01_buckets.ipynb" else [pytest.mark.slow])
    for path in NOTEBOOKS
])  # fmt: skip
def test_notebooks_run(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": tmp_path}}
    client = NotebookClient(notebook, timeout=int(HANG_GUARD), kernel_name="python3", resources=resources)
    client.execute()
    assert all(cell.execution_count for cell in code_cells(notebook))
    assert any(cell.outputs for cell in code_cells(notebook)), "a notebook shows something"
    assert not list(tmp_path.iterdir()), "a notebook cleans up after itself"
