"""Files of LoRA weights: those of diffusers, ComfyUI and other trainers are read, the first two are written."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from .. import __version__
from ..errors import BucketingError
from ..models.registry import family_of
from ..settings import plain_number
from .original_names import known_layers, original_layers, without_prefix

LORA_WEIGHTS = "pytorch_lora_weights.safetensors"
"""File that diffusers' `load_lora_weights` looks for in a folder."""

COMFYUI_WEIGHTS = "comfyui_lora_weights.safetensors"
"""File of the same adapters for ComfyUI."""

PEFT_FILES = (SAFETENSORS_WEIGHTS_NAME, CONFIG_NAME)
"""Files of LoHa and LoKr, as peft's `PeftModel.from_pretrained` expects them in a folder."""

ADAPTER_FILES = (LORA_WEIGHTS, COMFYUI_WEIGHTS, *PEFT_FILES)
"""Files that hold the adapters of a run."""

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Lower matrix `(rank, inputs)` and upper matrix `(outputs, rank)` of a layer."""

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
_ALPHA = ".alpha"
_PAIRS = (
    (DOWN, UP),
    (".lora_down.weight", ".lora_up.weight"),
    (".lora_A.default.weight", ".lora_B.default.weight"),
)
"""Ends of the names of the lower and the upper matrix of a layer."""

_NO_PAIRS = re.compile(
    r"\.(diff|diff_b|dora_scale|lora_magnitude_vector|w_norm|b_norm|lokr_.*|hada_.*|lora_.*\.bias)$"
)
"""Ends of names of what is no pair of matrices; readers of diffusers skip some of it without a word."""

_RANKS = "lora_ranks"
"""Entry of the header of a file for ComfyUI: for each layer, the ranks of its modules, which its matrix joins."""

SETTINGS_ENTRY = "lora_adapter_metadata"
"""Entry of the header of diffusers' files: the settings of peft."""

_ROUNDING = 1e-6
"""Largest difference between a change and what is read back, relative to the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """LoRA weights by their name in the transformer, as peft names them, and their origin.

    Attributes:
        path (`Path`): File that was read, or is to be written.
        weights (`dict` of `str` to `torch.Tensor`): Weights by name.
        alpha (`float`, *optional*): Numerator of the scale `alpha ÷ rank`; None if the scale is 1 at several ranks.
    """

    path: Path
    weights: Mapping[str, torch.Tensor]
    alpha: float | None

    @property
    def ranks(self) -> list[int]:
        """Ranks of the adapters, each once."""
        return sorted({len(value) for name, value in self.weights.items() if name.endswith(DOWN)})

    @property
    def layers(self) -> set[str]:
        """Names of the layers that have an adapter."""
        return {name.removesuffix(DOWN) for name in self.weights if name.endswith(DOWN)}

    def folded(self) -> dict[str, Pair]:
        """Return the matrices of each layer, the scale multiplied into the upper one, at least in float32."""
        return {layer: self._folded(layer) for layer in sorted(self.layers)}

    def _folded(self, layer: str) -> Pair:
        down, up = self.weights[layer + DOWN].cpu(), self.weights[layer + UP].cpu()
        return scaled((down, up), 1.0 if self.alpha is None else self.alpha / len(down))


def scaled(pair: Pair, scale: float) -> Pair:
    """Return a pair of matrices with a scale multiplied into the upper one, at least in float32."""
    down, up = (value.to(torch.promote_types(value.dtype, torch.float32)) for value in pair)
    return down, up if scale == 1.0 else up * scale


def strength(pair: Pair) -> float:
    """Return the Frobenius norm of the change that a pair of matrices makes, computed in float64 from small ones.

    Example:
        >>> round(strength((torch.ones(2, 3), torch.ones(4, 2))), 6) == round(float((2 * torch.ones(4, 3)).norm()), 6)
        True
    """
    down, up = (value.double() for value in pair)
    return float((torch.linalg.qr(up, mode="r").R @ down).norm())


def difference(one: Pair, other: Pair) -> float:
    """Return the Frobenius norm of the difference between two changes of a layer."""
    return strength((torch.cat([one[0], other[0]]), torch.cat([one[1], -other[1]], dim=1)))


def loads_lora(pipeline_class: type[Any]) -> bool:
    """Return whether pipelines of a class load LoRA weights into their transformer; PRX's would look for a U-Net."""
    return "transformer" in getattr(pipeline_class, "_lora_loadable_modules", ())


def check_loads_lora(pipeline_class: type[Any]) -> None:
    """Raise BucketingError if pipelines of a class cannot load LoRA weights."""
    if not loads_lora(pipeline_class):
        raise BucketingError(
            f"{pipeline_class.__name__} cannot load LoRA weights; train the whole transformer (leave out `lora_rank`)."
        )


def find_lora(path: str | os.PathLike[str]) -> Path:
    """Return the file of LoRA weights at a path: itself, or in a folder that for diffusers, else that for ComfyUI.

    Raises:
        BucketingError: If there is none.
    """
    names = [Path(path) / name for name in (LORA_WEIGHTS, COMFYUI_WEIGHTS)] if Path(path).is_dir() else [Path(path)]
    for file in names:
        if file.is_file():
            return file
    raise BucketingError(f"{names[0]} does not exist; name a file of LoRA weights, or a folder with {LORA_WEIGHTS}.")


def read_lora(pipeline_class: type[Any], transformer: Any, path: str | os.PathLike[str]) -> Adapters:
    """Read LoRA weights of a transformer at the strength that their file has.

    Names are those of diffusers, of the original checkpoint as ComfyUI, kohya's trainers, musubi-tuner, ai-toolkit,
    SimpleTuner and the LTX-2 trainer write them, or those that the pipeline's own reader knows. Scales in `.alpha`
    tensors are multiplied into the weights first, because some readers of diffusers ignore or refuse them. Scales in
    diffusers' header are kept, unless they differ by layer. A file without scales has a scale of 1.

    Args:
        pipeline_class (type): Class of the pipeline.
        transformer (`torch.nn.Module`): Its transformer, also without values, or with adapters.
        path (`str` or path): File, or folder with `pytorch_lora_weights.safetensors`.

    Raises:
        BucketingError: If there is no such file, the pipeline cannot load LoRA weights, or the file holds anything
            that is not plain LoRA of this transformer; the message names it.
    """
    check_loads_lora(pipeline_class)
    file = find_lora(path)
    try:
        with safe_open(file, framework="pt") as opened:
            header = opened.metadata() or {}
        state = load_file(file)
    except (OSError, SafetensorError) as error:
        raise BucketingError(f"{file} cannot be read as LoRA weights: {error}") from error
    if SETTINGS_ENTRY in header and any(name.endswith(_ALPHA) for name in state):
        raise BucketingError(f"{file} has two scales, in its header and in {_ALPHA} tensors; remove one of them.")
    pairs, left = _pairs_of(fold_alpha(state), transformer, ranks=json.loads(header.get(_RANKS, "{}")))
    if left and not any(_NO_PAIRS.search(name) for name in left):
        pairs, left = _pairs_of(_as_diffusers_reads(pipeline_class, fold_alpha(state), file), transformer, ranks={})
    if left or not pairs:
        why = f"{sorted(left)[0]} has no module of its name and shape" if left else "there is no weight in it"
        raise BucketingError(
            f"{file} must hold plain LoRA weights of a transformer ({type(transformer).__name__}) and nothing else: "
            f"{why}."
        )
    weights: dict[str, torch.Tensor] = {}
    for layer, (down, up) in pairs.items():
        weights |= {layer + DOWN: down, layer + UP: up}
    prefix = f"{pipeline_class.transformer_name}."
    return with_scales(file, weights, settings_of(file, header, prefix=prefix))


def settings_of(file: Path, header: Mapping[str, str], *, prefix: str) -> dict[str, Any]:
    """Return the settings of peft that a file of adapters has in its header, or peft's own file beside it.

    Args:
        file (`Path`): File of the weights.
        header (mapping of `str` to `str`): Header of the file.
        prefix (`str`): What diffusers writes in front of the names of the transformer's settings.

    Raises:
        BucketingError: If the settings beside a file of peft cannot be read, so that its scale is unknown.
    """
    if file.name == SAFETENSORS_WEIGHTS_NAME:
        try:
            settings: dict[str, Any] = json.loads((file.parent / CONFIG_NAME).read_text())
        except (OSError, ValueError) as error:
            raise BucketingError(
                f"{file} has its scale in {CONFIG_NAME} beside it, which cannot be read: {error}"
            ) from error
        return settings
    named = json.loads(header.get(SETTINGS_ENTRY, "{}"))
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def with_scales(file: Path, weights: dict[str, torch.Tensor], saved: Mapping[str, Any]) -> Adapters:
    """Return weights with the scale that the settings of peft give; one that differs by layer is multiplied in."""
    if saved.get("use_dora"):
        raise BucketingError(f"{file} must hold plain LoRA weights of a transformer and nothing else: use_dora.")
    ranks = {layer.removesuffix(DOWN): len(value) for layer, value in weights.items() if layer.endswith(DOWN)}
    common = next(iter(ranks.values())) if len(set(ranks.values())) == 1 else None
    alpha = plain_number(saved.get("lora_alpha", LoraConfig.lora_alpha), f"lora_alpha of {file}", integer=False)
    alphas = saved.get("alpha_pattern") or {}
    if not (alphas or saved.get("rank_pattern") or saved.get("use_rslora")):
        return Adapters(path=file, weights=weights, alpha=alpha if saved else common)
    folded: dict[str, torch.Tensor] = {}
    for layer, rank in ranks.items():
        number = alphas.get(get_pattern_key(list(alphas), layer), alpha)
        scale = number / (math.sqrt(rank) if saved.get("use_rslora") else rank)
        folded[layer + DOWN], folded[layer + UP] = scaled((weights[layer + DOWN], weights[layer + UP]), scale)
    return Adapters(path=file, weights=folded, alpha=common)


def _as_diffusers_reads(
    pipeline_class: type[Any], state: Mapping[str, torch.Tensor], file: Path
) -> dict[str, torch.Tensor]:
    """Return what a pipeline's own reader makes of weights."""
    try:
        read = pipeline_class.lora_state_dict(dict(state))
    except (ValueError, RuntimeError, KeyError, IndexError, TypeError) as error:
        raise BucketingError(f"{file} cannot be read as LoRA weights: {error}") from error
    return dict(read[0] if isinstance(read, tuple) else read)


def _pairs_of(
    state: Mapping[str, torch.Tensor], transformer: Any, *, ranks: Mapping[str, list[int]]
) -> tuple[dict[str, Pair], set[str]]:
    """Return the matrices of each module of a transformer, and the names of the weights that belong to none.

    Of a fused layer, modules share the lower matrix, unless `ranks` has the parts that belong to each; modules whose
    rows are zero were not trained.
    """
    known, left = known_layers(transformer), set(state)
    pairs: dict[str, Pair] = {}
    for name in state:
        for ends in _PAIRS:
            layer = name.removesuffix(ends[0])
            parts = known.get(without_prefix(layer), {})
            if layer == name or layer + ends[1] not in state or not parts or parts.keys() & pairs.keys():
                continue
            down, up = state[layer + ends[0]], state[layer + ends[1]]
            if len(up) != sum(parts.values()):
                continue
            left -= {layer + ends[0], layer + ends[1]}
            layer_ranks = ranks.get(without_prefix(layer))
            uppers = dict(zip(parts, up.split(list(parts.values())), strict=True))
            if layer_ranks is None:
                trained = uppers if len(parts) == 1 else {part: rows for part, rows in uppers.items() if rows.any()}
                pairs |= {part: (down, rows) for part, rows in trained.items()}
                continue
            begin = 0
            for (part, rows), rank in zip(uppers.items(), layer_ranks, strict=True):
                if rank:
                    pairs[part] = down[begin : begin + rank], rows[:, begin : begin + rank]
                begin += rank
    return pairs, left


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
        down, up = (layer + name for name in names)
        folded[down], folded[up] = scaled((state[down], state[up]), float(state[layer + _ALPHA]) / len(state[down]))
    return folded


def for_diffusers(path: str) -> str | dict[str, torch.Tensor]:
    """Return a path for `load_lora_weights`, or the weights of a file with `.alpha` tensors beside peft's names.

    These are multiplied in, as some readers of diffusers ignore them.
    """
    if not Path(path).is_file() or Path(path).suffix != ".safetensors":
        return path
    with safe_open(path, framework="pt") as file:
        names, header = set(file.keys()), file.metadata() or {}
    layers = [name.removesuffix(_ALPHA) for name in names if name.endswith(_ALPHA)]
    if not layers or SETTINGS_ENTRY in header or not all(layer + DOWN in names for layer in layers):
        return path
    return fold_alpha(load_file(path))


def write_diffusers(pipeline_class: type[Any], adapters: Adapters, config: LoraConfig | None = None) -> None:
    """Write adapters as diffusers' own file, with the settings of peft in its header.

    Args:
        pipeline_class (type): Class of the pipeline.
        adapters ([`Adapters`]): Adapters, with the path to write.
        config (`peft.LoraConfig`, *optional*): Settings of the adapters; by default those that their weights have.
    """
    if config is None:
        ranks = {layer: len(adapters.weights[layer + DOWN]) for layer in sorted(adapters.layers)}
        differ = len(adapters.ranks) > 1
        alpha: Any = adapters.ranks[0] if adapters.alpha is None else adapters.alpha  # peft says int
        config = LoraConfig(
            r=adapters.ranks[0],
            lora_alpha=alpha,
            target_modules=list(ranks),
            rank_pattern=ranks if differ else {},
            alpha_pattern=ranks if differ and adapters.alpha is None else {},
        )
    settings = {
        name: sorted(value) if isinstance(value, set) else value  # a set has another order in each process
        for name, value in config.to_dict().items()
        if name != "exclude_modules"  # who loads the file adds adapters to the layers in it, and none is to exclude
    }
    _writer(pipeline_class).save_lora_weights(
        str(adapters.path.parent),
        weight_name=adapters.path.name,
        transformer_lora_layers={  # files hold no views, and modules of a fused layer may share a matrix
            name: value.clone(memory_format=torch.contiguous_format) for name, value in adapters.weights.items()
        },
        transformer_lora_adapter_metadata=settings,
    )


def _writer(pipeline_class: type[Any]) -> Any:
    """Return the class that writes the file: that of the pipeline, unless diffusers only reads what it would write.

    So it is for Anima, whose names are those of all pipelines with one transformer.
    """
    from diffusers.loaders import WanLoraLoaderMixin
    from diffusers.loaders.lora_base import LoraBaseMixin

    writers: tuple[Any, Any] = (pipeline_class.save_lora_weights, LoraBaseMixin.save_lora_weights)
    only_reads = len({writer.__func__ for writer in writers}) == 1
    return WanLoraLoaderMixin if only_reads else pipeline_class


def base_name(name_or_path: str, transformer_file: str | None = None) -> str:
    """Return what adapters were trained on: a pipeline without its folders, and the file of its weights, if any.

    Args:
        name_or_path (`str`): Pipeline on the hub or in a folder.
        transformer_file (`str`, *optional*): File of the weights of its transformer.

    Example:
        >>> base_name("Wan-AI/Wan2.1-T2V-14B-Diffusers", "models/wan2.1_t2v_14B_fp8_scaled.safetensors")
        'Wan-AI/Wan2.1-T2V-14B-Diffusers with wan2.1_t2v_14B_fp8_scaled.safetensors'
    """
    is_folder = bool(name_or_path) and Path(name_or_path).exists()
    pipeline = Path(name_or_path).resolve().name if is_folder else name_or_path
    return pipeline if transformer_file is None else f"{pipeline} with {Path(transformer_file).name}"


def write_comfyui(pipeline_class: type[Any], transformer: Any, adapters: Adapters, *, base_model: str) -> None:
    """Write adapters as ComfyUI reads them, and prove that the pipeline's own reader returns the same change.

    Layers have the original checkpoint's names. The scale is multiplied into the weights, because readers disagree
    about where it stands, and all layers have one rank, because diffusers before 0.40 misreads others without a scale.

    Args:
        pipeline_class (type): Class of the pipeline.
        transformer (`torch.nn.Module`): Its transformer, also without values, or with adapters.
        adapters ([`Adapters`]): Adapters, with the path to write.
        base_model (`str`): Pipeline that they were trained on, or its [`base_name`], for the header.

    Raises:
        BucketingError: If the names of its layers are not known, or the file is read back differently.
    """
    state, ranks = comfyui_state(transformer, adapters)
    header = {
        "format": "pt",
        "base_model": base_name(base_model),
        "hf_bucketing": __version__,
        _RANKS: json.dumps(ranks),
    }
    save_file(state, adapters.path, metadata=header)
    check_reading(pipeline_class, load_file(adapters.path), adapters)


def comfyui_state(transformer: Any, adapters: Adapters) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """Return adapters as ComfyUI names them, and the ranks of the modules of each layer, 0 for those without adapter.

    Modules that the original checkpoint fuses become blocks on the diagonal of one upper matrix.

    Raises:
        BucketingError: If the names of some layers are not known.
    """
    family, layers, pairs = family_of(transformer), original_layers(transformer), adapters.folded()
    if unknown := sorted(pairs.keys() - {module for parts in layers.values() for module in parts}):
        raise BucketingError(f"the name of {unknown[0]} in the original checkpoint of this model is not proven")
    state, ranks = {}, {}
    for name, parts in layers.items():
        if not pairs.keys() & parts.keys():
            continue
        ranks[name] = [len(pairs[part][0]) if part in pairs else 0 for part in parts]
        down = torch.cat([pairs[part][0] for part in parts if part in pairs])
        none = {part: down.new_zeros(rows, 0) for part, rows in parts.items() if part not in pairs}
        state[name] = down, torch.block_diag(*(none[part] if part in none else pairs[part][1] for part in parts))
    rank = max(len(down) for down, _ in state.values())
    named = {}
    for name, (down, up) in state.items():
        named[f"{family.original_prefix}{name}{DOWN}"] = F.pad(down, (0, 0, 0, rank - len(down))).contiguous()
        named[f"{family.original_prefix}{name}{UP}"] = F.pad(up, (0, rank - len(down))).contiguous()
    return named, ranks


def check_reading(pipeline_class: type[Any], state: Mapping[str, torch.Tensor], adapters: Adapters) -> None:
    """Raise BucketingError unless a pipeline's own reader returns the change that adapters make to each layer."""
    read = _as_diffusers_reads(pipeline_class, state, adapters.path)
    prefix = f"{pipeline_class.transformer_name}."
    changes = {
        name.removeprefix(prefix).removesuffix(DOWN): (value, read[name.removesuffix(DOWN) + UP])
        for name, value in read.items()
        if name.endswith(DOWN)
    }
    pairs = adapters.folded()
    for layer, pair in pairs.items():
        if layer not in changes or difference(pair, changes[layer]) > _ROUNDING * strength(pair):
            raise BucketingError(f"diffusers reads {layer} back differently")
    if extra := [layer for layer in changes.keys() - pairs.keys() if strength(changes[layer])]:
        raise BucketingError(f"diffusers reads {extra[0]}, which has no adapter")


def prove_names(pipeline_class: type[Any], transformer: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise BucketingError unless adapters of these shapes can be written for ComfyUI, tried with random weights."""
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(value.shape, generator=generator) for name, value in weights.items()}
    marked = Adapters(path=Path(COMFYUI_WEIGHTS), weights=drawn, alpha=None)
    check_reading(pipeline_class, comfyui_state(transformer, marked)[0], marked)
