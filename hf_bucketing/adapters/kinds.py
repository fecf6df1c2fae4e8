"""Kinds of adapters of peft: LoRA, DoRA, LoHa and LoKr, and files that hold them exactly.

A file of LoRA may come from anywhere and keeps its strength when it is read (`files.py`). What a run resumes from, and
any other kind, is read here: weights by the names that peft gives them, and the settings that they belong to.

| kind | change of a weight W | file | loaded by |
|---|---|---|---|
| LoRA (Hu et al., 2021) | B A | `pytorch_lora_weights.safetensors` | `pipeline.load_lora_weights` |
| DoRA (Liu et al., 2024) | m (W + B A) / norm(W + B A) − W | the same | the same |
| LoHa (Hyeon-Woo et al., 2022) | (B₁ A₁) ⊙ (B₂ A₂) | `adapter_model.safetensors` and its configuration | \
`peft.PeftModel.from_pretrained(pipeline.transformer, folder)` |
| LoKr (Yeh et al., 2024) | C ⊗ (B A) | the same | the same |
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.lycoris_utils import LycorisLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.integrations import dequantize_module_weight
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..errors import BucketingError
from ..placement.sharding import copy_full, name_in_files, named_weights
from .files import (
    COMFYUI_WEIGHTS,
    DOWN,
    LORA_WEIGHTS,
    UP,
    Adapters,
    difference,
    read_lora,
    scaled,
    settings_of,
    strength,
)
from .settings import AdapterConfig, alphas_by_pattern, ranks_by_pattern

ADAPTER = "default"
"""Name of the adapter in peft; files do not hold it."""

_PEFT_PREFIX = "base_model.model."
"""What peft's files have in front of names."""

_Config: TypeAlias = LoraConfig | LoHaConfig | LoKrConfig

_SCALES = (
    "peft_type", "r", "lora_alpha", "alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
    "decompose_both", "decompose_factor",
)  # fmt: skip
"""Settings of peft that say what weights mean."""


def peft_config(config: AdapterConfig, *, targets: Sequence[str], unused: Sequence[str]) -> _Config:
    """Return the settings of adapters as peft takes them; modules with one of `unused` in their name get none."""
    assert config.lora_rank is not None, "the caller checks it"
    common: dict[str, Any] = {
        "r": config.lora_rank,
        "target_modules": list(targets),
        "exclude_modules": f".*({'|'.join(map(re.escape, unused))}).*" if unused else None,
        "rank_pattern": ranks_by_pattern(config.lora_rank_pattern),
        "alpha_pattern": alphas_by_pattern(config.lora_alpha_pattern),
    }
    alpha: Any = config.lora_alpha or config.lora_rank  # peft says int, and divides whatever it is
    if config.has_pairs:
        return LoraConfig(
            lora_alpha=alpha,
            init_lora_weights="gaussian",
            use_dora=config.adapter == "dora",
            use_rslora=config.lora_rslora,
            lora_dropout=config.lora_dropout,
            **common,
        )
    kind = LoHaConfig if config.adapter == "loha" else LoKrConfig
    return kind(alpha=alpha, rank_dropout=config.lora_dropout, **common)


@torch.no_grad()
def correct_layers(transformer: torch.nn.Module) -> None:
    """Make new layers of peft change nothing at the start, and take part in every step.

    Magnitudes of DoRA become the norms of the weights in float32: peft rounds them to the precision of the weights,
    and divides by norms in that of the adapters. LoHa and LoKr skip a layer if they draw no more than
    `module_dropout`; they draw 0 some times in 10⁸, and DDP fails where a process has no gradient for a layer.
    """
    for layer in transformer.modules():
        if isinstance(layer, LycorisLayer):
            layer.module_dropout[ADAPTER] = -1.0
        elif isinstance(layer, LoraLayer) and layer.lora_magnitude_vector:
            weight = dequantize_module_weight(layer.get_base_layer()).float()
            magnitude = layer.lora_magnitude_vector[ADAPTER]
            magnitude.weight = torch.nn.Parameter(torch.linalg.norm(weight, dim=1))


def adapters_of(transformer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a transformer's trainable adapters, as peft names them in files."""
    named = {name: value for name, value in named_weights(transformer) if value.requires_grad}
    return {_without_adapter(name): value for name, value in named.items()}


def _without_adapter(name: str) -> str:
    """Return the name of a weight in files.

    Example:
        >>> _without_adapter("q.lora_A.default.weight")
        'q.lora_A.weight'
        >>> _without_adapter("q.lora_magnitude_vector.default.weight"), _without_adapter("q.hada_w1_a.default")
        ('q.lora_magnitude_vector', 'q.hada_w1_a')
    """
    name = name.replace(f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector")
    return name.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactAdapters:
    """Adapters as a file holds them.

    Attributes:
        path (`Path`): File of the weights.
        weights (`dict` of `str` to `torch.Tensor`): Weights by the names that peft gives them in files.
        settings (`dict`): Settings of peft; empty if the file has none.
    """

    path: Path
    weights: dict[str, torch.Tensor]
    settings: dict[str, Any]

    @property
    def alpha(self) -> float | None:
        """Numerator of the scale, if the file has it."""
        alpha: float | None = self.settings.get("lora_alpha", self.settings.get("alpha"))
        return alpha

    @property
    def layers(self) -> set[str]:
        """Names of the layers that have an adapter."""
        return {re.split(r"\.(?:lora|hada|lokr)_", name)[0] for name in self.weights}

    @property
    def config(self) -> _Config:
        """The settings as peft's own value.

        Raises:
            BucketingError: If the file has none, or those of another kind.
        """
        kinds = {"LORA": LoraConfig, "LOHA": LoHaConfig, "LOKR": LoKrConfig}
        kind = str(self.settings.get("peft_type", "")).rpartition(".")[2]
        if kind not in kinds:
            raise BucketingError(
                f"{self.path} has no settings of LoRA, DoRA, LoHa or LoKr, so their scale is unknown."
            )
        return kinds[kind].from_peft_type(**self.settings)


def read_exact(path: str | os.PathLike[str], *, prefix: str = "transformer") -> ExactAdapters:
    """Read adapters and their settings as they were saved.

    Args:
        path (`str` or path): File, or folder of a run or of peft.
        prefix (`str`): Name of the transformer in files of diffusers.

    Raises:
        BucketingError: If there is no such file, or it cannot be read.
    """
    names = (LORA_WEIGHTS, SAFETENSORS_WEIGHTS_NAME, COMFYUI_WEIGHTS)
    files = [Path(path) / name for name in names] if Path(path).is_dir() else [Path(path)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise BucketingError(f"{path} has no adapters; name a folder with {' or '.join(names)}, or such a file.")
    try:
        with safe_open(file, framework="pt") as opened:
            header = opened.metadata() or {}
        state = load_file(file)
    except (OSError, SafetensorError) as error:
        raise BucketingError(f"{file} cannot be read as adapters: {error}") from error
    settings = settings_of(file, header, prefix=f"{prefix}.")
    before = _PEFT_PREFIX if file.name == SAFETENSORS_WEIGHTS_NAME else f"{prefix}."
    weights = {name.removeprefix(before): value for name, value in state.items()}
    return ExactAdapters(path=file, weights=weights, settings=settings)


def load_exact(transformer: Any, adapters: ExactAdapters) -> None:
    """Copy weights into the adapters that a transformer has.

    Raises:
        BucketingError: If kind, ranks, scales, layers or shapes differ; the message names one difference.
    """
    config, weights = transformer.peft_config[ADAPTER].to_dict(), adapters_of(transformer)
    saved = adapters.config.to_dict()
    scales = [(name, saved.get(name), config.get(name)) for name in _SCALES]
    differences = [f"{name} {was} and not {now}" for name, was, now in scales if was != now]
    differences += [f"{name}, which no layer has" for name in sorted(adapters.weights.keys() - weights.keys())]
    for name, value in weights.items():
        if name not in adapters.weights:
            differences.append(f"no {name}")
        elif adapters.weights[name].shape != value.shape:
            differences.append(f"{name} of shape {tuple(adapters.weights[name].shape)}, not {tuple(value.shape)}")
    if differences:
        raise BucketingError(f"{adapters.path} does not fit these adapters: it has {differences[0]}.")
    for name, value in weights.items():
        copy_full(value, adapters.weights[name])


def with_scales_of_layers(
    transformer: torch.nn.Module, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return whole weights of a transformer's LoRA, with the scale that each layer computes with multiplied in."""
    with_scales: dict[str, torch.Tensor] = {}
    for name, layer in transformer.named_modules():
        name = name_in_files(name)
        if isinstance(layer, LoraLayer) and name + DOWN in weights:
            pair = weights[name + DOWN], weights[name + UP]
            with_scales[name + DOWN], with_scales[name + UP] = scaled(pair, layer.scaling[ADAPTER])
    return with_scales


@torch.no_grad()
def check_changes(transformer: torch.nn.Module, weights: Mapping[str, torch.Tensor], adapters: Adapters) -> None:
    """Raise BucketingError unless weights in a transformer's layers make the change of adapters, rounding aside.

    Args:
        transformer (`torch.nn.Module`): A transformer with layers of LoRA, whose scales count.
        weights (mapping of `str` to `torch.Tensor`): What was loaded into them.
        adapters ([`Adapters`]): What was to be loaded.
    """
    rounding = max(torch.finfo(value.dtype).eps for value in weights.values())
    live = Adapters(path=adapters.path, weights=with_scales_of_layers(transformer, weights), alpha=None).folded()
    for layer, pair in adapters.folded().items():
        loaded = live[layer]
        if difference(pair, loaded) > rounding * math.prod(float(value.norm()) for value in pair):
            raise BucketingError(
                f"{adapters.path} changes the weight of {layer} by {strength(pair):.6g} (norm), and loaded by "
                f"{strength(loaded):.6g}, which is more than rounding; this is a fault of this library or of peft."
            )


def check_file(transformer: torch.nn.Module, adapters: Adapters) -> None:
    """Raise BucketingError unless diffusers loads from the file of adapters the change that they make.

    Args:
        transformer (`torch.nn.Module`): A transformer of diffusers without values and without adapters.
        adapters ([`Adapters`]): Adapters, with the path of diffusers' file.
    """
    loaded: Any = copy.deepcopy(transformer)
    loaded.load_lora_adapter(
        str(adapters.path.parent), weight_name=adapters.path.name, adapter_name=ADAPTER, low_cpu_mem_usage=True
    )
    weights = {name.removeprefix("transformer."): value for name, value in load_file(adapters.path).items()}
    check_changes(loaded, weights, adapters)


def write_peft(folder: Path, weights: Mapping[str, torch.Tensor], config: _Config, *, base_model: str) -> None:
    """Write adapters for `PeftModel.from_pretrained(pipeline.transformer, folder)`."""
    saved = replace(
        config,
        base_model_name_or_path=base_model,
        target_modules=sorted(config.target_modules or ()),  # a set has another order in each process
        inference_mode=True,
    )
    saved.save_pretrained(str(folder))
    state = {_PEFT_PREFIX + name: value.contiguous() for name, value in weights.items()}
    save_file(state, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


@torch.no_grad()
def merge_adapters(pipeline_class: type[Any], transformer: Any, path: str | os.PathLike[str]) -> int:
    """Add the change that adapters make to the weights of a transformer, in float32.

    Args:
        pipeline_class (type): Class of the pipeline.
        transformer (`torch.nn.Module`): Its transformer, whose weights keep their precision.
        path (`str` or path): Adapters: LoRA of any trainer, or the folder of a run or of peft.

    Returns:
        `int`: Number of layers that have changed.

    Raises:
        BucketingError: If the adapters cannot be read, do not fit the transformer, or make a weight too large for its
            precision.
    """
    exact = read_exact(path)
    if exact.settings.get("use_dora") or exact.path.name == SAFETENSORS_WEIGHTS_NAME:
        return _merge_exact(transformer, exact)
    pairs = read_lora(pipeline_class, transformer, path).folded()
    for name, (down, up) in pairs.items():
        weight = transformer.get_submodule(name).weight
        merged = weight.float() + (up @ down).to(weight.device)
        _check_rounding(name, merged, merged.to(weight.dtype))
        weight.copy_(merged)
    return len(pairs)


def _check_rounding(name: str, merged: torch.Tensor, stored: torch.Tensor) -> None:
    """Raise BucketingError if a merged weight in the precision of its file differs by more than rounding."""
    limits = torch.finfo(stored.dtype)
    if not torch.allclose(stored.float(), merged, rtol=limits.eps, atol=limits.smallest_normal):
        largest = float(merged.abs().max())
        raise BucketingError(
            f"Merged, the weight of {name} reaches {largest:.4g}, which {stored.dtype} cannot hold; merge adapters of "
            "less strength, or into a pipeline whose files have a wider precision."
        )


def _merge_exact(transformer: Any, adapters: ExactAdapters) -> int:
    """Put adapters into their layers as peft does, and layers without adapters in their place."""
    transformer.requires_grad_(False)
    transformer.add_adapter(adapters.config, adapter_name=ADAPTER)
    load_exact(transformer, adapters)
    layers: dict[str, Any] = {
        name: layer for name, layer in transformer.named_modules() if isinstance(layer, BaseTunerLayer)
    }
    for name, layer in layers.items():
        base = layer.get_base_layer()
        dtype = base.weight.dtype
        layer.float()
        layer.merge()
        _check_rounding(name, base.weight, base.weight.to(dtype))
        parent, _, child = name.rpartition(".")
        setattr(transformer.get_submodule(parent), child, base.to(dtype))
    del transformer.peft_config
    transformer._hf_peft_config_loaded = False
    return len(layers)
