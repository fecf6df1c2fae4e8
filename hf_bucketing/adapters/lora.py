"""Low-rank adapters (LoRA, Hu et al., 2021) on the transformer, by peft, saved as diffusers loads them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ..errors import BucketingError
from ..files import complete_parts
from ..models.experts import transformers_of
from ..models.registry import family_of
from ..placement.shards import copy_whole, gather, named_weights
from .settings import AdapterConfig

logger = get_logger(__name__)

LORA_WEIGHTS = "pytorch_lora_weights.safetensors"
"""File that diffusers' `load_lora_weights` looks for in a folder."""

SETTINGS = "training_config.json"
"""File in the output folder of a run that holds its settings."""

_DOWN = ".lora_A.weight"

_ALPHA = ".alpha"

_PAIRS = (
    (_DOWN, ".lora_B.weight"),
    (".lora_down.weight", ".lora_up.weight"),
    (".lora_A.default.weight", ".lora_B.default.weight"),
)
"""Ends of the names of the lower and the upper matrix of a layer."""

ADAPTER = "default"
"""Name of the adapter in peft; files do not hold it."""


def add_lora(pipeline: Any, config: AdapterConfig, *, component: str = "transformer") -> None:
    """Freeze a component of a pipeline, its transformer, and add trainable low-rank adapters to it.

    Raises:
        BucketingError: If the pipeline cannot load LoRA weights, or no module name ends with a target.
    """
    check_loads_lora(type(pipeline))
    add_adapters(getattr(pipeline, component), config)


def add_adapters(transformer: Any, config: AdapterConfig) -> None:
    """Freeze a transformer and add trainable low-rank adapters, none to modules that the model does not use.

    Raises:
        BucketingError: If no module name ends with a target.
    """
    targets = lora_targets(transformer, config)
    settings = _lora_config(config, targets=targets, unused=family_of(transformer).unused(transformer))
    transformer.requires_grad_(False)
    try:
        transformer.add_adapter(settings, adapter_name=ADAPTER)
    except ValueError as error:
        raise BucketingError(f"No adapter fits `lora_targets`, {targets}: {error}") from error


def lora_targets(transformer: Any, config: AdapterConfig) -> list[str]:
    """Return the suffixes of the names of modules that receive adapters."""
    return list(family_of(transformer).lora_targets) if config.lora_targets is None else config.lora_targets.split(",")


def _lora_config(config: AdapterConfig, *, targets: list[str], unused: Sequence[str]) -> LoraConfig:
    """Return the settings of adapters as peft takes them; modules with one of `unused` in their name get none."""
    assert config.lora_rank is not None, "the caller checks it"
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or config.lora_rank,
        init_lora_weights="gaussian",
        target_modules=targets,
        exclude_modules=f".*({'|'.join(map(re.escape, unused))}).*" if unused else None,
    )


def start_adapters(pipeline: Any, config: AdapterConfig, *, component: str = "transformer") -> AdapterConfig:
    """Add adapters to a pipeline, see [`add_lora`], with the weights that they start from.

    Returns:
        [`AdapterConfig`]: The settings with the alpha and the targets that the adapters have.

    Raises:
        BucketingError: If adapters cannot be added, or do not fit the file that they start from.
    """
    if config.init_from_adapters is not None:
        check_component(config.init_from_adapters, component=component)
    start = None if config.init_from_adapters is None else read_lora(pipeline, config.init_from_adapters)
    config = replace(
        config,
        lora_alpha=config.lora_alpha or (config.lora_rank if start is None else start.alpha),
        lora_targets=",".join(lora_targets(getattr(pipeline, component), config)),
    )
    add_lora(pipeline, config, component=component)
    if start is not None:
        load_lora(pipeline, start, component=component)
        logger.info(f"Starting from the adapters of {len(start.layers)} layers in {start.path}")
    return config


def check_loads_lora(pipeline_class: type[Any]) -> None:
    """Raise BucketingError if pipelines of a class cannot load LoRA weights."""
    if not hasattr(pipeline_class, "save_lora_weights"):
        raise BucketingError(
            f"{pipeline_class.__name__} cannot load LoRA weights; train the whole transformer (leave out `lora_rank`)."
        )


def check_component(path: str, *, component: str) -> None:
    """Raise BucketingError if LoRA weights are those of a run that trained another transformer of its pipeline.

    Their names do not tell: diffusers gives those of `transformer` and of `transformer_2` the same. The settings of a
    run do, which lie beside its weights and above its checkpoints.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    of_both = folder.name in transformers_of("both") and not (folder / SETTINGS).is_file()
    run = folder.parent if of_both else folder
    settings = (run.parent if run.name.startswith("checkpoint-") else run) / SETTINGS
    trained = json.loads(settings.read_text())["trained_component"] if settings.is_file() else component
    if trained == "both" and of_both:
        trained = folder.name
    if trained != component:
        raise BucketingError(
            f"{path} holds adapters of {trained}, as {settings} says, and this run trains {component}; give "
            f"`trained_component={trained}`, or other adapters."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """LoRA weights by their name in the transformer, as peft names them, and their origin.

    Attributes:
        path (`Path`): File that was read.
        weights (`dict` of `str` to `torch.Tensor`): Weights by name.
        alpha (`int`): Numerator of the scale `alpha ÷ rank`.
    """

    path: Path
    weights: dict[str, torch.Tensor]
    alpha: int

    @property
    def ranks(self) -> list[int]:
        """Ranks of the adapters, each once."""
        return sorted({len(value) for name, value in self.weights.items() if name.endswith(_DOWN)})

    @property
    def layers(self) -> set[str]:
        """Names of the layers that have an adapter."""
        return {name.removesuffix(_DOWN) for name in self.weights if name.endswith(_DOWN)}


def read_lora(pipeline: Any, path: str | os.PathLike[str]) -> Adapters:
    """Read LoRA weights as stock diffusers does, from a file or a folder with `pytorch_lora_weights.safetensors`.

    A file without an alpha has a scale of 1, as in diffusers. Scales in `.alpha` tensors, as other trainers write
    them, are multiplied into the weights first, because some readers of diffusers ignore or refuse them.

    Raises:
        BucketingError: If there is no such file, the pipeline cannot load LoRA weights, or they are not plain LoRA of
            a transformer.
    """
    check_loads_lora(type(pipeline))
    file = Path(path) / LORA_WEIGHTS if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise BucketingError(f"{file} does not exist; name a file of LoRA weights, or a folder with {LORA_WEIGHTS}.")
    try:
        state, metadata = _state_of(type(pipeline), file)
    except (OSError, SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise BucketingError(f"{file} cannot be read as LoRA weights: {error}") from error
    prefix = f"{type(pipeline).transformer_name}."
    saved = {name.removeprefix(prefix): value for name, value in (metadata or {}).items() if name.startswith(prefix)}
    unusual = [name for name in ("alpha_pattern", "rank_pattern", "use_dora", "use_rslora") if saved.get(name)]
    weights = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    adapters = Adapters(path=file, weights=weights, alpha=0)
    foreign = sorted(set(state) - {prefix + name for name in weights})
    if unusual or foreign or not adapters.ranks:
        why = ", ".join(unusual) or f"{foreign[0] if foreign else 'no weight'} is in it"
        raise BucketingError(f"{file} must hold plain LoRA weights of a {prefix[:-1]} and nothing else: {why}.")
    return replace(adapters, alpha=int(saved.get("lora_alpha", adapters.ranks[0])))


def _state_of(pipeline_class: type[Any], file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """Return what a pipeline's own reader makes of a file, and the settings of the adapters if the file has them."""
    with safe_open(file, framework="pt") as opened:
        scaled = any(name.endswith(_ALPHA) for name in opened.keys())  # noqa: SIM118 (it is no dictionary)
        header = opened.metadata() or {}
    if not scaled:
        state, settings = pipeline_class.lora_state_dict(
            str(file.parent), weight_name=file.name, return_lora_metadata=True
        )
        return state, settings
    if "lora_adapter_metadata" in header:
        raise BucketingError(f"{file} has two scales, in its header and in {_ALPHA} tensors; remove one of them.")
    read = pipeline_class.lora_state_dict(fold_alpha(load_file(file)))
    return (read[0] if isinstance(read, tuple) else read), None


def fold_alpha(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Multiply the scale alpha ÷ rank of each layer into its upper matrix, and drop the `.alpha` tensors.

    Args:
        state (mapping of `str` to `torch.Tensor`): LoRA weights `X.lora_A.weight` and `X.lora_B.weight`, or
            `X.lora_down.weight` and `X.lora_up.weight`, and for some or all layers `X.alpha`, a single number.

    Returns:
        `dict`: The weights, whose scale is 1.

    Raises:
        BucketingError: If an alpha belongs to no such pair.

    Example:
        >>> ones = {"q.lora_A.weight": torch.ones(2, 3), "q.lora_B.weight": torch.ones(4, 2)}
        >>> fold_alpha({**ones, "q.alpha": torch.tensor(8.0)})["q.lora_B.weight"][0]
        tensor([4., 4.])
    """
    folded = {name: value for name, value in state.items() if not name.endswith(_ALPHA)}
    for layer in (name.removesuffix(_ALPHA) for name in state if name.endswith(_ALPHA)):
        names = next((pair for pair in _PAIRS if layer + pair[0] in state and layer + pair[1] in state), None)
        if names is None:
            raise BucketingError(f"{layer}{_ALPHA} scales no pair of LoRA matrices; remove it, or convert the file.")
        scale = float(state[layer + _ALPHA]) / len(state[layer + names[0]])
        folded[layer + names[1]] = folded[layer + names[1]] * scale
    return folded


def adapters_of(transformer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of the adapters that [`add_lora`] added, as peft names them."""
    return {
        name.replace(f".{ADAPTER}.", "."): parameter
        for name, parameter in named_weights(transformer)
        if parameter.requires_grad
    }


def load_lora(pipeline: Any, adapters: Adapters, *, component: str = "transformer") -> None:
    """Load weights into the adapters that [`add_lora`] added.

    Raises:
        BucketingError: If rank, alpha, layers or shapes differ; the message names both values.
    """
    transformer = getattr(pipeline, component)
    config = transformer.peft_config[ADAPTER]
    weights = adapters_of(transformer)
    layers = Adapters(path=adapters.path, weights=weights, alpha=config.lora_alpha).layers
    differences = []
    if adapters.ranks != [config.r]:
        differences.append(f"rank {' and '.join(map(str, adapters.ranks))}, not `lora_rank={config.r}`")
    if adapters.alpha != config.lora_alpha:
        differences.append(f"alpha {adapters.alpha}, not `lora_alpha={config.lora_alpha}`")
    if adapters.layers != layers:
        some = sorted(adapters.layers ^ layers)[0]
        differences.append(
            f"{len(adapters.layers)} layers, while `lora_targets` names {len(layers)} (one that differs: {some})"
        )
    if not differences:
        differences = [
            f"{name} of shape {tuple(adapters.weights[name].shape)}, not {tuple(value.shape)}"
            if name in adapters.weights
            else f"no {name}"
            for name, value in weights.items()
            if name not in adapters.weights or adapters.weights[name].shape != value.shape
        ][:1]
    if differences:
        raise BucketingError(f"{adapters.path} does not fit these adapters: it has {'; '.join(differences)}.")
    for name, value in weights.items():
        copy_whole(value, adapters.weights[name])


def checkpoint_adapters_only(
    accelerator: Accelerator, pipeline: Any, *, component: str = "transformer", subfolder: str = ""
) -> None:
    """Make accelerate's checkpoints hold a model's adapters in diffusers' own file, and not its other weights."""

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        weights.clear()  # accelerate saves what is left here
        save_lora(pipeline, os.path.join(folder, subfolder), component=component)

    def load(models: list[Any], folder: str) -> None:
        models.clear()
        load_lora(pipeline, read_lora(pipeline, os.path.join(folder, subfolder)), component=component)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def save_lora(pipeline: Any, folder: str | os.PathLike[str], *, component: str = "transformer") -> None:
    """Write a transformer's adapters as `pytorch_lora_weights.safetensors`, for `pipeline.load_lora_weights(folder)`.

    Call it on every process; the main one writes. Load adapters of `transformer_2` with
    `load_into_transformer_2=True`.
    """
    transformer = getattr(pipeline, component)
    weights = {name: gather(value.detach()) for name, value in adapters_of(transformer).items()}
    if not PartialState().is_main_process:
        return
    config = {
        name: sorted(value) if isinstance(value, set) else value  # a set has another order in each process
        for name, value in transformer.peft_config[ADAPTER].to_dict().items()
        if name != "exclude_modules"  # who loads the file adds adapters to the layers in it, and none is to exclude
    }
    with complete_parts(folder) as partial:
        type(pipeline).save_lora_weights(
            str(partial), transformer_lora_layers=weights, transformer_lora_adapter_metadata=config
        )
