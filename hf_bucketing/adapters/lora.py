"""Adapters on the transformer, by peft, from their start to their files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from diffusers.training_utils import cast_training_params
from peft.tuners.lora import LoraLayer

from ..errors import BucketingError
from ..files import complete_parts
from ..models.experts import transformers_of
from ..models.registry import family_of
from ..placement.sharding import copy_full, gather
from .files import (
    ADAPTER_FILES,
    COMFYUI_WEIGHTS,
    LORA_WEIGHTS,
    Adapters,
    base_name,
    check_loads_lora,
    prove_names,
    read_lora,
    write_comfyui,
    write_diffusers,
)
from .kinds import (
    ADAPTER,
    ExactAdapters,
    adapters_of,
    check_changes,
    correct_layers,
    load_exact,
    peft_config,
    read_exact,
    with_scales_of_layers,
    write_peft,
)
from .settings import SETTINGS, AdapterConfig, LoraFormat

logger = get_logger(__name__)


def add_lora(pipeline: Any, config: AdapterConfig, *, component: str = "transformer", audio: bool = False) -> None:
    """Freeze a component of a pipeline, its transformer, and add trainable adapters to it.

    Raises:
        BucketingError: If the pipeline cannot load such adapters, or no module name ends with a target.
    """
    if config.has_pairs:
        check_loads_lora(type(pipeline))
    add_adapters(getattr(pipeline, component), config, audio=audio)


def add_adapters(transformer: Any, config: AdapterConfig, *, audio: bool = False) -> None:
    """Freeze a transformer and add trainable adapters, none to modules that the model does not use.

    With `audio`, also to those that serve audio alone.

    Raises:
        BucketingError: If no module name ends with a target.
    """
    family, targets = family_of(transformer), lora_targets(transformer, config)
    unused = family.unused_in(transformer, audio=audio)
    without = [*unused, *(family.without_lora if targets == list(family.lora_targets) else ())]
    settings = peft_config(config, targets=targets, unused=without)
    transformer.requires_grad_(False)
    try:
        transformer.add_adapter(settings, adapter_name=ADAPTER)
    except ValueError as error:
        raise BucketingError(f"No adapter fits `lora_targets`, {targets}: {error}") from error
    correct_layers(transformer)
    if config.adapter == "lora" and not settings.lora_dropout:
        leave_casts_to_autocast(transformer)


def leave_casts_to_autocast(transformer: Any) -> None:
    """Let layers of LoRA without dropout not cast what autocast casts.

    peft casts the input of each layer to the float32 of its adapters, and autocast then casts it back: two copies of
    all tokens, and two more in the backward pass, which change no bit.
    """
    for module in transformer.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = OUTSIDE_AUTOCAST


class _OutsideAutocast:
    """True where no autocast is active, asked anew each time."""

    def __bool__(self) -> bool:
        return not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))


OUTSIDE_AUTOCAST: Any = _OutsideAutocast()


def lora_targets(transformer: Any, config: AdapterConfig) -> list[str]:
    """Return the suffixes of the names of modules that receive adapters."""
    return list(family_of(transformer).lora_targets) if config.lora_targets is None else config.lora_targets.split(",")


def start_adapters(
    pipeline: Any,
    config: AdapterConfig,
    *,
    component: str = "transformer",
    dtype: torch.dtype = torch.float32,
    audio: bool = False,
) -> AdapterConfig:
    """Add adapters of a precision to a pipeline, see [`add_lora`], with the weights that they start from.

    Returns:
        [`AdapterConfig`]: The settings with the alpha and the targets that the adapters have, and the format in which
            they can be saved.

    Raises:
        BucketingError: If adapters cannot be added or saved, or do not fit the file that they start from.
    """
    if config.init_from_adapters is not None:
        check_component(config.init_from_adapters, component=component)
    transformer = getattr(pipeline, component)
    start: Adapters | ExactAdapters | None = None
    if config.init_from_adapters is not None and config.plain:
        start = read_lora(type(pipeline), transformer, config.init_from_adapters)
    elif config.init_from_adapters is not None:
        start = read_exact(config.init_from_adapters)
    config = replace(
        config,
        lora_alpha=config.lora_alpha or (config.lora_rank if start is None else start.alpha),
        lora_targets=",".join(lora_targets(transformer, config)),
    )
    add_lora(pipeline, config, component=component, audio=audio)
    cast_training_params(transformer, dtype=dtype)  # peft made them in that of the frozen weights
    lora_format = config.lora_format if config.adapter == "lora" else "diffusers"
    config = replace(config, lora_format=_possible_format(type(pipeline), transformer, lora_format))
    if not config.has_pairs:
        logger.info(
            f"Pipelines of diffusers do not load `adapter={config.adapter}` of every model: it is saved as peft's own "
            f"files. Load them by peft.PeftModel.from_pretrained(pipeline.{component}, folder)."
        )
    if isinstance(start, ExactAdapters):
        load_exact(transformer, start)
    elif start is not None:
        load_lora(pipeline, start, component=component)
    if start is not None:
        logger.info(f"Starting from the adapters of {len(start.layers)} layers in {start.path}")
    return config


def _possible_format(pipeline_class: type[Any], transformer: Any, lora_format: LoraFormat) -> LoraFormat:
    """Return the format for a transformer with adapters: diffusers' alone where both cannot be written.

    Raises:
        BucketingError: If ComfyUI's alone is asked for and cannot be written.
    """
    if lora_format == "diffusers":
        return lora_format
    try:
        prove_names(pipeline_class, transformer, adapters_of(transformer))
    except BucketingError as error:
        why = f"Adapters of this {type(transformer).__name__} cannot be saved for ComfyUI: {error}"
        if lora_format == "comfyui":
            raise BucketingError(f"{why}. Save them for diffusers, with `lora_format=diffusers`.") from error
        logger.warning(f"{why}. They are saved for diffusers alone.")
        return "diffusers"
    return lora_format


def check_component(path: str, *, component: str) -> None:
    """Raise BucketingError if LoRA weights are those of a run that trained another transformer of its pipeline.

    Their names do not tell: diffusers gives those of `transformer` and of `transformer_2` the same. The settings of a
    run do, which lie beside its weights and above its checkpoints.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    of_both = folder.name in transformers_of("both") and not (folder / SETTINGS).is_file()
    run = folder.parent if of_both else folder
    settings = run / SETTINGS
    if not settings.is_file() and run.name.startswith("checkpoint-"):  # also a copy of one, as checkpoint-best
        settings = run.parent / SETTINGS
    trained = json.loads(settings.read_text())["trained_component"] if settings.is_file() else component
    if trained == "both" and of_both:
        trained = folder.name
    if trained != component:
        raise BucketingError(
            f"{path} holds adapters of {trained}, as {settings} says, and this run trains {component}; give "
            f"`trained_component={trained}`, or other adapters."
        )


def load_lora(pipeline: Any, adapters: Adapters, *, component: str = "transformer") -> None:
    """Load weights into the adapters that [`add_lora`] added.

    Raises:
        BucketingError: If rank, alpha, layers or shapes differ, or the change of a layer; the message names both
            values.
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
        copy_full(value, adapters.weights[name])
    if not any(value.is_meta for value in weights.values()):  # a process without weights gets its share later
        check_changes(transformer, weights, adapters)


def checkpoint_adapters_only(
    accelerator: Accelerator,
    pipeline: Any,
    *,
    component: str = "transformer",
    lora_format: LoraFormat = "diffusers",
    transformer_file: str | None = None,
    subfolder: str = "",
) -> None:
    """Make accelerate's checkpoints hold a model's adapters, in a folder of their own if named, not all its weights.

    They are resumed from the file of diffusers or peft; a run that saves for ComfyUI has its file beside it.
    """

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        weights.clear()  # accelerate saves what is left here
        formats: LoraFormat = "diffusers" if lora_format == "diffusers" else "both"
        save_lora(
            pipeline,
            os.path.join(folder, subfolder),
            component=component,
            lora_format=formats,
            transformer_file=transformer_file,
        )

    def load(models: list[Any], folder: str) -> None:
        models.clear()
        load_exact(getattr(pipeline, component), read_exact(os.path.join(folder, subfolder)))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def save_lora(
    pipeline: Any,
    folder: str | os.PathLike[str],
    *,
    component: str = "transformer",
    lora_format: LoraFormat = "diffusers",
    transformer_file: str | None = None,
) -> None:
    """Write a transformer's adapters for diffusers, `pytorch_lora_weights.safetensors`, for ComfyUI, or for both.

    LoHa and LoKr, which pipelines of diffusers do not load, become files of peft. Call it on every process; the main
    one writes. `pipeline.load_lora_weights(folder)` loads LoRA and DoRA; those of `transformer_2` need
    `load_into_transformer_2=True`.

    Files name the pipeline that was trained, and the `transformer_file` that its weights came from, if any.

    Raises:
        BucketingError: If diffusers reads what was written for ComfyUI back differently; nothing is saved then.
    """
    transformer = getattr(pipeline, component)
    weights = {name: gather(value.detach()) for name, value in adapters_of(transformer).items()}
    if not PartialState().is_main_process:
        return
    config, source = transformer.peft_config[ADAPTER], _source_of(pipeline)
    base = base_name(source, transformer_file)
    with complete_parts(folder) as partial:
        if config.peft_type != "LORA":
            write_peft(Path(partial), weights, config, base_model=source if transformer_file is None else base)
        elif lora_format != "comfyui":
            adapters = Adapters(path=Path(partial) / LORA_WEIGHTS, weights=weights, alpha=config.lora_alpha)
            write_diffusers(type(pipeline), adapters, replace(config, base_model_name_or_path=base))
        if config.peft_type == "LORA" and lora_format != "diffusers":
            adapters = Adapters(
                path=Path(partial) / COMFYUI_WEIGHTS, weights=with_scales_of_layers(transformer, weights), alpha=None
            )
            write_comfyui(type(pipeline), transformer, adapters, base_model=base)
        written = {file.name for file in Path(partial).iterdir()}
    for file in set(ADAPTER_FILES) - written:  # what an earlier run left is another adapter
        (Path(folder) / file).unlink(missing_ok=True)


def _source_of(pipeline: Any) -> str:
    """Return where a pipeline was loaded from, also a modular one, which names it otherwise; `""` for a new one."""
    names = (getattr(pipeline, name, None) for name in ("name_or_path", "_pretrained_model_name_or_path"))
    return next((str(name) for name in names if name), "")
