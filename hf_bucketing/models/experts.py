"""Pipelines of two transformers (Wan 2.2 A14B, MiniMax-H3): which of them a run trains."""

from __future__ import annotations

from typing import Literal, TypeAlias

TrainedComponent: TypeAlias = Literal["transformer", "transformer_2", "both", "transformer_ref"]
"""Transformers that a run trains: one by its name in the pipeline, or both experts of a pipeline that has two.

`transformer_ref` is that of MiniMax-H3 for samples with references."""


def transformers_of(component: TrainedComponent) -> tuple[str, ...]:
    """Return the names of the transformers that a run trains.

    Example:
        >>> transformers_of("both")
        ('transformer', 'transformer_2')
    """
    return ("transformer", "transformer_2") if component == "both" else (component,)
