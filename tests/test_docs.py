"""The figures of README.md and docs/ are those of the JSON files that the benchmarks wrote."""

from __future__ import annotations

from tests.conftest import run_script_here


def test_figures_in_the_documentation_are_up_to_date() -> None:
    run_script_here("update_docs.py", "--check")
