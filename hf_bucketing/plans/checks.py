"""Checks that all plans share."""

from __future__ import annotations

from typing import Any, Literal, get_args

from ..errors import PlanError

Oversize = Literal["error", "own_batch", "drop"]
"""What happens to a sample that exceeds a limit by itself: an error, a batch above the limit, or a counted drop."""


def check_processes(num_processes: int) -> None:
    """Raise PlanError unless at least one process shares the plan."""
    if num_processes < 1:
        raise PlanError(f"num_processes must be at least 1, got {num_processes}.")


def check_choices(config: object, **choices: Any) -> None:
    """Raise PlanError unless each named setting is one of the values of its `Literal` type."""
    for name, literal in choices.items():
        if getattr(config, name) not in get_args(literal):
            raise PlanError(f"`{name}` must be one of {', '.join(get_args(literal))}; got {getattr(config, name)!r}.")


def check_at_least_one(config: object, *names: str) -> None:
    """Raise PlanError if one of the named settings is below 1; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise PlanError(f"`{name}` must be at least 1, got {value}.")


def check_positive(config: object, *names: str) -> None:
    """Raise PlanError if one of the named settings is not above 0; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise PlanError(f"`{name}` must be above 0, got {value}.")
