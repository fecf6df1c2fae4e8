"""Figures and tables as Markdown."""

from __future__ import annotations

from typing import Any

from ..errors import BucketingError


def figure_text(value: Any, form: str | None) -> str:
    """Return a value as text: integers with thousands separators, floats in `form` or with three digits."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, (dict, list)):
        raise BucketingError(f"{value!r} is not one figure.")
    if form is not None and isinstance(value, float):
        return format(value, form)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown_table(rows: list[dict[str, Any]], form: str | None) -> str:
    """Return a Markdown table, in which columns of numbers stand to the right."""
    if not rows or any(list(row) != list(rows[0]) for row in rows):
        raise BucketingError("The rows of a table are objects with the same names, in the same order.")
    numbers = [all(not isinstance(row[name], str) for row in rows) for name in rows[0]]
    lines = [list(rows[0]), ["---:" if number else "---" for number in numbers]]
    lines += [[figure_text(value, form) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
