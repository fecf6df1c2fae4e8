"""How messages name rows that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from .apply import undecoded

NAMED_ROWS = 3
"""Rows that a message names; of the others it gives the number."""


def path_of(cell: Any) -> str | None:
    """Return the path in a cell of undecoded media; None for bytes without one."""
    path = cell.get("path") if isinstance(cell, dict) else cell
    return path if isinstance(path, str) else None


def paths_of(dataset: Dataset, rows: Sequence[int], media_column: str) -> list[str | None]:
    """Return the paths of the files of some rows, see [`path_of`]."""
    files = undecoded(dataset.select_columns([media_column]).select(rows), [media_column])
    return [*map(path_of, files[media_column])]


def listed(texts: Sequence[str], *, total: int, separator: str = "; ") -> str:
    """Join what is said of the first rows, with an ellipsis if there are more in total."""
    return separator.join([*texts, "…"] if total > len(texts) else texts)
