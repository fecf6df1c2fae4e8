"""Adapters in a pipeline: where those of each transformer lie, how they are loaded, and at which strengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.utils.peft_utils import set_adapter_layers, set_weights_and_activate_adapters
from peft import PeftModel
from peft.utils import CONFIG_NAME

from ..errors import BucketingError
from ..hub import from_hub
from ..models.experts import TrainedComponent, transformers_of
from ..models.registry import find_recipe
from .files import COMFYUI_WEIGHTS, LORA_WEIGHTS, for_diffusers
from .settings import Adapter


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


def load_adapters(pipeline: Any, adapters: Sequence[Adapter], *, trained: TrainedComponent) -> None:
    """Load adapters into a pipeline, at full strength until [`set_strengths`] is called.

    Args:
        pipeline (`DiffusionPipeline`): Pipeline that they were trained on.
        adapters (sequence of [`Adapter`]): Adapters: LoRA or DoRA of any trainer that diffusers reads, or one LoHa or
            LoKr.
        trained (`"transformer"`, `"transformer_2"`, `"both"` or `"transformer_ref"`): Transformers that they are for.

    Raises:
        BucketingError: If adapters cannot be had, or one among several is LoHa or LoKr.
    """
    for adapter, name in zip(adapters, _names(adapters), strict=True):
        folders = {
            component: Path(adapter.path) / expert_folder(component, trained=trained)
            for component in transformers_of(trained)
        }
        with from_hub(adapter.path):
            if not all((folder / CONFIG_NAME).is_file() for folder in folders.values()):
                first = next(iter(folders.values()))
                alone = (first / COMFYUI_WEIGHTS).is_file() and not (first / LORA_WEIGHTS).is_file()
                if (recipe := find_recipe(type(pipeline).__name__)) is not None:
                    for component in folders:
                        getattr(pipeline, component).register_to_config(**recipe.read_with_lora)
                for options in loading_options(trained, file=COMFYUI_WEIGHTS if alone else None):
                    pipeline.load_lora_weights(for_diffusers(adapter.path), adapter_name=name, **options)
                continue
            if len(adapters) > 1:
                raise BucketingError(
                    f"{adapter.path} is LoHa or LoKr, which cannot be loaded with other adapters; merge it into the "
                    "pipeline first (hf_bucketing merge)."
                )
            for component, folder in folders.items():
                PeftModel.from_pretrained(getattr(pipeline, component), str(folder), adapter_name=name)


def set_strengths(pipeline: Any, adapters: Sequence[Adapter], *, factor: float) -> None:
    """Scale the adapters that a pipeline has loaded, all by the same factor; 0 leaves the base model alone.

    Args:
        pipeline (`DiffusionPipeline`): Pipeline that [`load_adapters`] has loaded these adapters into.
        adapters (sequence of [`Adapter`]): The adapters with their strengths.
        factor (`float`): Factor of all strengths.
    """
    strengths = {name: factor * adapter.strength for adapter, name in zip(adapters, _names(adapters), strict=True)}
    active = {name: strength for name, strength in strengths.items() if strength}  # DoRA of 0 is not the base
    for model in pipeline.components.values():
        if isinstance(model, torch.nn.Module):
            set_adapter_layers(model, enabled=bool(active))
            if active:
                set_weights_and_activate_adapters(model, [*active], [*active.values()])


def _names(adapters: Sequence[Adapter]) -> list[str]:
    """Return the names of adapters in peft."""
    return [f"adapter_{number}" for number in range(len(adapters))]
