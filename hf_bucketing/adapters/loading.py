"""Adapters that are loaded: into a pipeline, each at its strength, or frozen below those that are trained.

Few-step models lose their few steps when they are trained as they are. Their users train on top of an adapter that
undoes the distillation, and leave it out afterwards, so that what was trained works at few steps. Such an adapter is
frozen: on while a model trains, and off in what it renders and saves.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.utils.peft_utils import set_adapter_layers, set_weights_and_activate_adapters
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME
from safetensors import SafetensorError, safe_open

from ..errors import BucketingError
from ..hub import from_hub
from ..models.experts import TrainedComponent, transformers_of
from ..models.registry import find_recipe
from .files import COMFYUI_WEIGHTS, LORA_WEIGHTS, find_lora, for_diffusers, read_lora
from .kinds import ADAPTER
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


_PREFIX = "frozen_"
"""How the names of frozen adapters begin in peft."""


@torch.no_grad()
def add_frozen(pipeline: Any, adapters: Sequence[Adapter], *, component: str = "transformer") -> None:
    """Add adapters that are not trained to a component of a pipeline, before those that are.

    Args:
        pipeline (`DiffusionPipeline`): Pipeline whose component has no adapters yet.
        adapters (sequence of [`Adapter`]): Files of LoRA of any trainer that is read, with the strength of each.
        component (`str`): The transformer.

    Raises:
        BucketingError: If a file cannot be read, or holds anything that is not plain LoRA of this transformer.
    """
    transformer = getattr(pipeline, component)
    for number, adapter in enumerate(adapters):
        name = f"{_PREFIX}{number}"
        pairs = read_lora(type(pipeline), transformer, adapter.path).folded()
        ranks = {re.escape(layer): len(down) for layer, (down, _) in pairs.items()}
        largest = max(ranks.values())
        # alpha = rank in each layer: the scale of the file is part of its weights
        config = LoraConfig(
            r=largest, lora_alpha=largest, rank_pattern=ranks, alpha_pattern=ranks, target_modules=[*pairs]
        )
        with torch.random.fork_rng([]):  # what peft draws is replaced, and trained adapters begin as without it
            transformer.add_adapter(config, adapter_name=name)
        for layer, (down, up) in pairs.items():
            module = transformer.get_submodule(layer)
            module.lora_A[name].weight.copy_(down)
            module.lora_B[name].weight.copy_(adapter.strength * up)
    transformer.requires_grad_(False)


def switch_on(transformer: torch.nn.Module) -> None:
    """Let layers compute with the trained adapters and the frozen ones, as in training."""
    for layer, frozen in _frozen_layers(transformer):
        layer._active_adapter = [ADAPTER, *frozen]  # peft's own switch would also train them


@contextmanager
def without_frozen(transformer: torch.nn.Module) -> Iterator[None]:
    """Switch the frozen adapters of a transformer, bare or wrapped, off inside a `with` block."""
    layers = [layer for layer, _ in _frozen_layers(transformer)]
    before = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = [ADAPTER]
    try:
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer._active_adapter = active


@contextmanager
def base_model(transformer: torch.nn.Module) -> Iterator[None]:
    """Switch the trained adapters of a transformer, bare or wrapped, off in a `with` block; frozen ones stay on."""
    # peft's own switch also stops the gradients of adapters: FSDP2 keeps what it finds in the first forward.
    frozen = {id(layer): names for layer, names in _frozen_layers(transformer)}
    layers = [layer for layer in transformer.modules() if isinstance(layer, BaseTunerLayer)]
    before = [(layer._disable_adapters, layer._active_adapter) for layer in layers]
    for layer in layers:
        if id(layer) in frozen:
            layer._active_adapter = frozen[id(layer)]
        else:
            layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, (disabled, active) in zip(layers, before, strict=True):
            layer._disable_adapters, layer._active_adapter = disabled, active


def _frozen_layers(transformer: torch.nn.Module) -> Iterator[tuple[Any, list[str]]]:
    """Yield the layers that have frozen adapters, and the names of these."""
    for layer in transformer.modules():
        if isinstance(layer, LoraLayer) and (names := [name for name in layer.lora_A if name.startswith(_PREFIX)]):
            yield layer, names


def fingerprints(adapters: Sequence[Adapter]) -> dict[str, str]:
    """Return sixteen hex digits of each file of frozen adapters, by its number, which change with the file.

    Raises:
        BucketingError: If there is no such file.
    """
    files = [find_lora(adapter.path) for adapter in adapters]
    return {
        f"{_PREFIX}{number}": hashlib.sha256(file.read_bytes()).hexdigest()[:16] for number, file in enumerate(files)
    }


def count_weights(path: str | Path) -> int:
    """Return how many numbers a file of LoRA weights holds, by its header alone.

    Raises:
        BucketingError: If there is no such file, or it cannot be read.
    """
    file = find_lora(path)
    try:
        with safe_open(file, framework="pt") as opened:
            return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BucketingError(f"{file} cannot be read as LoRA weights: {error}") from error
