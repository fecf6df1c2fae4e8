"""Bytes in memory by kind, and what exists at the highest moment of each phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

from ..units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteCounts:
    """Bytes that exist at one time: each field of a derived class is a kind of them."""

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(asdict(self).values())

    def __str__(self) -> str:
        counts = {**asdict(self), "total": self.total}
        return ", ".join(f"{kind.replace('_', ' ')} {format_bytes(count)}" for kind, count in counts.items() if count)


P = TypeVar("P", bound=ByteCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases(Generic[P]):
    """Memory that is needed, phase by phase.

    Attributes:
        phases (mapping of `str` to [`ByteCounts`]): What exists at the highest moment of each phase.
    """

    phases: Mapping[str, P]

    @property
    def highest(self) -> str:
        """The phase with the highest memory."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def peak(self) -> P:
        """What exists at the highest moment."""
        return self.phases[self.highest]

    @property
    def total(self) -> int:
        """Bytes at the highest moment."""
        return self.peak.total

    def __str__(self) -> str:
        return f"{self.peak} (highest in {self.highest})"
