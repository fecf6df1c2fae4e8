"""Rules for settings that changed since the checkpoint, which the field of each setting names.

| rule | settings |
|---|---|
| `applied` | take effect from the next step on, and are logged |
| `equal` | decide the objective, or what weights and the optimizer's state mean: refused by name if changed |
| `plan` | decide the plan: the sampler refuses to load its state if its plan differs; paths may change, rows may not |
| `weights` | compared by a fingerprint of the weights, so that a model may move to another folder |
| `free` | change nothing about what is learned |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accelerate import Accelerator

from ..conditions.shares import most_appended
from ..errors import BucketingError, quoted
from ..packing.family import Family
from ..placement.sharding import SHARDED
from ..settings import changed, marked, settings_in
from .run import TrainingConfig

ON_RESUME: dict[str, str] = marked(TrainingConfig, "on_resume")
"""The rule of each setting of [`TrainingConfig`]."""

_DEFAULTS = {setting.name: setting.default for setting in settings_in(TrainingConfig)}

_NOT_SETTINGS = ("distributed_type",)
"""Values that must stay equal beside the settings."""


def settings_of(config: TrainingConfig, accelerator: Accelerator) -> dict[str, Any]:
    """Return the settings of a run as JSON values, including those that accelerate chose, for its checkpoint."""
    kind = accelerator.distributed_type
    return {
        **config.flat(),
        "mixed_precision": accelerator.mixed_precision,
        "distributed_type": kind.value if kind in SHARDED else "not sharded",
    }


def resumed_config(saved: Mapping[str, Any], config: TrainingConfig, accelerator: Accelerator) -> TrainingConfig:
    """Return the settings of a resumed run, with those left open taken from the saved run.

    Precision and distributed type of the accelerator count as settings, as in [`settings_of`].

    Raises:
        BucketingError: If a setting that must stay equal differs; the message names its value then and now.
    """
    saved = {**_DEFAULTS, **saved}  # checkpoints of earlier releases do not name all settings
    current = config.flat()
    left_open = {
        name: saved[name]
        for name, value in marked(TrainingConfig, "left_open").items()
        if current[name] == value and saved[name] is not None
    }
    present = {**settings_of(config, accelerator), **left_open}
    fixed = [*(name for name, rule in ON_RESUME.items() if rule == "equal"), *_NOT_SETTINGS]
    differences = _differences(saved, present, fixed)
    if differences:
        listed = "; ".join(f"{name} was {_text(was)} and is {_text(now)}" for name, was, now in differences)
        raise BucketingError(
            f"The checkpoint cannot be resumed with other settings: {listed}. Give those of the saved run, or start "
            "a new run in another --output_dir (--init_from_adapters starts from the adapters of this one)."
        )
    return changed(config, **left_open)


def check_weights(saved: Mapping[str, str], present: Mapping[str, str], *, source: str) -> None:
    """Refuse to resume a run on other weights than it began with: fingerprints by component of the pipeline.

    Compared are the components that both runs load; which ones these are depends on caches and validation.

    Raises:
        BucketingError: If components differ; the message names them.
    """
    differences = _differences(saved, present, sorted(saved.keys() & present.keys()))
    if differences:
        listed = "; ".join(f"{name} had fingerprint {was} and has {now}" for name, was, now in differences)
        raise BucketingError(
            f"The run began with other weights than those of {source}: {listed}. Give the pipeline that it began with "
            "(--pretrained_model_name_or_path, and --transformer_file and --vae_file if it had any), or start a new "
            "run in another --output_dir (--init_from_adapters starts from the adapters of this one)."
        )


def check_references(saved: Mapping[str, Any], config: TrainingConfig, family: Family) -> None:
    """Refuse to resume a run that begins or ceases to append frames, where these have weights of their own.

    Raises:
        BucketingError: If other weights would be trained than in the saved run.
    """
    was, now = (most_appended(condition) > 0 for condition in (saved.get("condition"), config.objective.condition))
    if was != now and family.reference_parts and config.adapters.lora_rank is None:
        raise BucketingError(
            f"The saved run {'appended frames' if was else 'appended no frames'}, and `condition` "
            f"{'appends some' if now else 'appends none'}: it would train other weights of this model, "
            f"{quoted([part.rstrip('.') for part in family.reference_parts])}. Give a condition that "
            f"{'appends' if was else 'does not append'} frames, or start a new run in another --output_dir."
        )


def applied_changes(saved: Mapping[str, Any], config: TrainingConfig, accelerator: Accelerator) -> list[str]:
    """Return the settings that take a new value, each as `"learning_rate 0.0001 → 5e-05"`."""
    names = [name for name, rule in ON_RESUME.items() if rule == "applied"]
    differences = _differences(saved, settings_of(config, accelerator), names)
    return [f"{name} {_text(was)} → {_text(now)}" for name, was, now in differences]


def _differences(
    saved: Mapping[str, Any], present: Mapping[str, Any], names: Iterable[str]
) -> list[tuple[str, object, object]]:
    values = ((name, saved.get(name), present.get(name)) for name in names)
    return [(name, was, now) for name, was, now in values if was != now]


def _text(value: object) -> str:
    return "not given" if value is None else str(value)
