"""Adapters of both experts of a pipeline: each has a folder of its own, as their names in files are the same."""

from __future__ import annotations

from typing import Any

from ..models.experts import TrainedComponent, transformers_of
from .files import LORA_WEIGHTS


def expert_folder(component: str, *, trained: TrainedComponent) -> str:
    """Return the folder of the adapters of a transformer, relative to that of the run: its name, or `""` if alone.

    Args:
        component (`str`): Name of the transformer in its pipeline.
        trained (`TrainedComponent`): Transformers that the run trains.
    """
    return component if trained == "both" else ""


def loading_options(trained: TrainedComponent, *, file: str | None = None) -> list[dict[str, Any]]:
    """Return the options with which diffusers' `load_lora_weights` loads the adapters of a run, call by call.

    Args:
        trained (`TrainedComponent`): Transformers that the run trained.
        file (`str`, *optional*): Name of the file, by default that of diffusers.

    Example:
        >>> loading_options("transformer_2")
        [{'load_into_transformer_2': True}]
        >>> loading_options("both")[0]
        {'subfolder': 'transformer', 'weight_name': 'pytorch_lora_weights.safetensors'}
    """
    calls = []
    for component in transformers_of(trained):
        folder = expert_folder(component, trained=trained)
        options: dict[str, Any] = {"weight_name": file} if file is not None else {}
        options |= {"subfolder": folder, "weight_name": file or LORA_WEIGHTS} if folder else {}
        calls.append(options | ({f"load_into_{component}": True} if component != "transformer" else {}))
    return calls
