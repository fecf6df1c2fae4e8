"""Pipelines of two transformers (Wan 2.2 A14B): which of them a run trains."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

TrainedComponent: TypeAlias = Literal["transformer", "transformer_2", "both"]
"""Transformers that a run trains: one by its name in the pipeline, or both experts of a pipeline that has two."""


def transformers_of(component: TrainedComponent) -> tuple[str, ...]:
    """Return the names of the transformers that a run trains.

    Example:
        >>> transformers_of("both")
        ('transformer', 'transformer_2')
    """
    return ("transformer", "transformer_2") if component == "both" else (component,)


def own_folder(component: str, *, trained: TrainedComponent) -> str:
    """Return the folder, relative to that of the run, of the adapters of a transformer: `""` or its name.

    Both experts have adapters of the same names, so that those of the second need a folder of their own. Each folder
    holds what a run of its transformer alone would have saved.
    """
    return component if component != transformers_of(trained)[0] else ""


def loading_options(trained: TrainedComponent) -> list[dict[str, Any]]:
    """Return the options with which diffusers' `load_lora_weights` loads the folder of a run, one call after another.

    Example:
        >>> loading_options("both")
        [{}, {'subfolder': 'transformer_2', 'load_into_transformer_2': True}]
    """
    calls = []
    for component in transformers_of(trained):
        folder = own_folder(component, trained=trained)
        options: dict[str, Any] = {"subfolder": folder} if folder else {}
        calls.append(options | ({"load_into_transformer_2": True} if component == "transformer_2" else {}))
    return calls
