"""Messages of the library name its commands, as an installed package has no files of a clone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

CLONE = re.compile(r"\w\.py\b|\bscripts/|\btests/")
"""Files of a clone: scripts, tests and modules."""


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module that are neither docstrings nor strings below attributes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


@pytest.mark.slow
def test_no_message_names_a_file_of_a_clone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / "hf_bucketing").rglob("*.py"))
        for line, text in messages(path)
        if CLONE.search(text)
    ]
    assert found == []


def test_a_file_of_a_clone_would_be_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""See tests/a.py."""\nx = f"run scripts/a.py {1}"\ny = "hf_bucketing prepare"\n')
    assert [text for _, text in messages(module) if CLONE.search(text)] == ["run scripts/a.py "]
