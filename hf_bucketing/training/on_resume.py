"""What becomes of each setting that changed since the checkpoint: applied, refused by name, or of no concern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from accelerate import Accelerator

from ..errors import BucketingError
from .checkpoint import SHARDED
from .config import TrainingConfig

Rule = Literal["applied", "equal", "plan", "weights", "free"]

_NAMES: dict[Rule, tuple[str, ...]] = {
    # Take effect from the next step on, and are logged: how fast to learn, for how long, and from which views.
    "applied": (
        *("learning_rate", "lr_scheduler", "lr_warmup_steps", "adam_beta1", "adam_beta2", "adam_weight_decay"),
        *("adam_epsilon", "max_grad_norm", "num_train_epochs", "max_train_steps", "gradient_accumulation_steps"),
        *("center_crop", "frame_picking", "flip_probability", "video_decoder", "caption_dropout"),
        *("on_error", "max_errors", "max_error_share", "gradient_checkpointing"),
    ),
    # Decide what the weights and the optimizer's state in a checkpoint mean, or what is trained towards. Sizes that
    # random_resize draws are more than the sampler's state knows: it holds the tokens of one epoch.
    "equal": (
        *("batching", "trained_component", "mixed_precision", "lora_rank", "lora_alpha", "lora_targets", "ema_decay"),
        *("optimizer", "weighting_scheme", "snr_gamma", "loss_reduction", "max_sequence_length", "random_resize"),
    ),
    # The sampler refuses to load its state if the plan that they make differs. Paths may change, rows may not.
    "plan": (
        *("dataset_dir", "train_batch_size", "capacity", "tail", "pack_strategy", "balance", "strip_length"),
        *("longest_first", "seed"),
    ),
    # Compared by a fingerprint of the weights, so that a model may move to another folder.
    "weights": ("pretrained_model_name_or_path",),
    # Change nothing of what is learned.
    "free": (
        *("output_dir", "dry_run", "dataloader_num_workers", "dataloader_timeout"),
        *("validation_prompts", "validation_sizes", "validation_steps", "validation_inference_steps"),
        *("validation_guidance_scale", "validation_fps", "checkpointing_steps", "checkpoints_total_limit"),
        *("resume_from_checkpoint", "init_from_adapters", "report_to"),
    ),
}

ON_RESUME: dict[str, Rule] = {name: rule for rule, names in _NAMES.items() for name in names}
"""The rule of each setting of [`TrainingConfig`]."""

_LEFT_OPEN: dict[str, object] = {"capacity": "auto", "lora_alpha": None}
"""Values that leave a setting to be determined: a resumed run takes what the saved one determined."""

_NOT_SETTINGS = ("distributed_type",)
"""What must stay equal beside the settings."""


def settings_of(config: TrainingConfig, accelerator: Accelerator) -> dict[str, Any]:
    """Return what a checkpoint keeps of a run's settings, as JSON values, with those that accelerate chose."""
    kind = accelerator.distributed_type
    return {
        **asdict(config),
        "mixed_precision": accelerator.mixed_precision,
        "distributed_type": kind.value if kind in SHARDED else "not sharded",
    }


def resumed_config(saved: Mapping[str, Any], config: TrainingConfig, accelerator: Accelerator) -> TrainingConfig:
    """Return the settings of a resumed run: those left open are taken from the saved run.

    Args:
        saved (mapping): From [`settings_of`], as the checkpoint holds them.
        config ([`TrainingConfig`]): Of the run that resumes.
        accelerator (`Accelerator`): Its precision and way of sharding count as settings.

    Raises:
        BucketingError: Names each setting that must stay equal and differs, with its value then and now.
    """
    left_open = {
        name: saved[name]
        for name, value in _LEFT_OPEN.items()
        if getattr(config, name) == value and saved[name] is not None
    }
    present = {**settings_of(config, accelerator), **left_open}
    fixed = [*(name for name, rule in ON_RESUME.items() if rule == "equal"), *_NOT_SETTINGS]
    differences = _differences(saved, present, fixed)
    if differences:
        told = "; ".join(f"{name} was {_text(was)} and is {_text(now)}" for name, was, now in differences)
        raise BucketingError(
            f"The checkpoint cannot be resumed with other settings: {told}. Give those of the saved run, or start a "
            "new run in another --output_dir (--init_from_adapters takes its adapters along)."
        )
    return replace(config, **left_open)


def check_weights(saved: Mapping[str, str], present: Mapping[str, str], *, source: str) -> None:
    """Refuse to resume a run on other weights than it began with.

    Args:
        saved (mapping of `str` to `str`): Fingerprints in the checkpoint, by component of the pipeline.
        present (mapping of `str` to `str`): Those of the pipeline that was loaded.
        source (`str`): Where it was loaded from.

    Raises:
        BucketingError: Names the components that differ.
    """
    names = [name for name in sorted({*saved, *present}) if saved.get(name) != present.get(name)]
    if names:
        told = "; ".join(
            f"{name} had fingerprint {saved.get(name, 'none')} and has {present.get(name, 'none')}" for name in names
        )
        raise BucketingError(
            f"The run began with other weights than those of {source}: {told}. Give the pipeline that it began with "
            "(--pretrained_model_name_or_path), or start a new run in another --output_dir (--init_from_adapters "
            "takes its adapters along)."
        )


def applied_changes(saved: Mapping[str, Any], config: TrainingConfig, accelerator: Accelerator) -> list[str]:
    """Return each setting that takes a new value, as `"learning_rate 0.0001 → 5e-05"`."""
    names = [name for name, rule in ON_RESUME.items() if rule == "applied"]
    differences = _differences(saved, settings_of(config, accelerator), names)
    return [f"{name} {_text(was)} → {_text(now)}" for name, was, now in differences]


def apply_settings(config: TrainingConfig, schedule: torch.optim.lr_scheduler.LambdaLR) -> None:
    """Give a schedule and its optimizer the present settings, which loading their states has replaced.

    The learning rate becomes the present one times the schedule's factor at the step that is reached.
    """
    groups = schedule.optimizer.param_groups
    for group, factor in zip(groups, schedule.lr_lambdas, strict=True):
        group["initial_lr"] = config.learning_rate
        group["lr"] = config.learning_rate * factor(schedule.last_epoch)
        group["betas"] = (config.adam_beta1, config.adam_beta2)
        group["weight_decay"] = config.adam_weight_decay
        group["eps"] = config.adam_epsilon
    schedule.base_lrs = [config.learning_rate] * len(schedule.lr_lambdas)
    schedule._last_lr = [group["lr"] for group in groups]  # as get_last_lr() returns them


def _differences(
    saved: Mapping[str, Any], present: Mapping[str, Any], names: list[str]
) -> list[tuple[str, object, object]]:
    return [(name, saved[name], present[name]) for name in names if saved[name] != present[name]]


def _text(value: object) -> str:
    return "not given" if value is None else str(value)
