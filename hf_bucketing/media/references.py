"""The rule of references where it first was, as a digest of the functions of a saved stream holds it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..conditions import references


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRule:
    """Hold the fields that rules had, in their order, so that runs from streams of earlier releases resume."""

    max_pixels: Any
    downscale_factor: Any
    short_side: Any
    multiples: Any
    least: int
    most: int
    in_front: bool
    text_tokens: int
    text_factor: int
    min_side: int
    max_ratio: Any
    pictures_only: bool
    appended: int = 0
    appended_first: bool = False
    appended_text: Any = None
    area: Any
    shapes: Any
    cropped: bool
    alone_pixels: Any
    as_stored: bool
    resample: str

    @classmethod
    def of(cls, rule: references.ReferenceRule) -> ReferenceRule:
        """Return that of a rule."""
        names = [item.name for item in fields(cls) if not item.name.startswith("appended")]
        return cls(**{name: getattr(rule, name) for name in names})
