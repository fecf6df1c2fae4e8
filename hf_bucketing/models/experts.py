"""Pipelines of two transformers (Wan 2.2 A14B): which of them a run trains."""

from __future__ import annotations

from typing import Literal, TypeAlias

TrainedComponent: TypeAlias = Literal["transformer", "transformer_2", "both"]
"""Transformers that a run trains: one by its name in the pipeline, or both experts of a pipeline that has two."""


def transformers_of(component: TrainedComponent) -> tuple[str, ...]:
    """Return the names of the transformers that a run trains.

    Example:
        >>> transformers_of("both")
        ('transformer', 'transformer_2')
    """
    return ("transformer", "transformer_2") if component == "both" else (component,)
