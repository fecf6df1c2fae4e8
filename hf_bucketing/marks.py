"""Words by which checks, plans and runs say how they came out: one set for terminals and pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

HOLDS, FAILED, NOT_CHECKED = "holds", "FAILED", "not checked"
"""Words of a check."""

MARKS: Mapping[str, Literal["good", "fair", "poor"]] = {
    HOLDS: "good",
    "fits": "good",
    "finished": "good",
    NOT_CHECKED: "fair",
    "tight": "fair",
    "still running or killed": "fair",
    "interrupted": "fair",
    FAILED: "poor",
    "does not fit": "poor",
    "failed": "poor",
}
"""What each word means, which is its class and so its colour on a page."""


def mark(holds: bool) -> str:
    """Return the word for whether a check holds.

    Example:
        >>> mark(True), mark(False)
        ('holds', 'FAILED')
    """
    return HOLDS if holds else FAILED
