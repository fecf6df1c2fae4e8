"""Optimizers by the name of their class: any that is installed, checked before a run loads weights."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from ..errors import BucketingError, did_you_mean
from .settings import ADAMW, OptimizerConfig

_SMALLEST_RATE = 0.1
"""Learning rate below which an optimizer that estimates its own hardly moves."""


def optimizer_class(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """Return the class of an optimizer.

    Raises:
        BucketingError: If it cannot be imported, or is no optimizer of torch.
    """
    module, _, name = ADAMW.get(config.optimizer, config.optimizer).partition(":")
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        members = vars(importlib.import_module(module))
    except ImportError as error:
        install = '"hf_bucketing[8bit]"' if package == "bitsandbytes" else package.replace("_", "-")
        raise BucketingError(
            f'`optimizer="{config.optimizer}"` needs {module} ({error}): pip install {install}, or use '
            '`optimizer="adamw"`.'
        ) from error
    kinds = [
        key for key, kind in members.items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    ]
    if name not in kinds:
        raise BucketingError(
            f'`optimizer="{config.optimizer}"`: {module} has no optimizer {name}{did_you_mean(name, kinds)}'
        )
    kind: type[torch.optim.Optimizer] = members[name]
    return kind


def switches_modes(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether weights differ between training and evaluation, as those of schedule-free optimizers do."""
    return hasattr(kind, "train") and hasattr(kind, "eval")


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise BucketingError for arguments, learning rates and schedules that an optimizer's class does not take."""
    kind = optimizer_class(config)
    parameters = inspect.signature(kind.__init__).parameters
    _check_arguments(config, parameters)
    if inspect.signature(kind.step).parameters["closure"].default is inspect.Parameter.empty:
        raise BucketingError(f"{config.optimizer} computes the loss several times per step; use another optimizer.")
    if switches_modes(kind) and config.lr_scheduler != "constant":
        raise BucketingError(
            f'{config.optimizer} replaces the schedule: use `lr_scheduler="constant"`, and warm up with '
            "`optimizer_args` if it has such an argument (warmup_steps=100)."
        )
    if "d0" not in parameters:
        return
    if config.learning_rate < _SMALLEST_RATE:
        raise BucketingError(
            f"{config.optimizer} estimates the learning rate, and multiplies it by `learning_rate="
            f"{config.learning_rate:g}`; give `learning_rate=1`."
        )
    if config.lora_plus_ratio is not None:
        raise BucketingError(
            f"Omit `lora_plus_ratio`: {config.optimizer} estimates one learning rate for all weights."
        )


def _check_arguments(config: OptimizerConfig, parameters: Any) -> None:
    """Raise BucketingError for arguments that a constructor does not have, or that are settings of their own."""
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        parameters = {**parameters, **config.arguments()}
    known = [name for name in parameters if name not in ("self", "params", "lr")]
    for name in config.arguments():
        if name not in known:
            hint = "; give `learning_rate`." if name == "lr" else did_you_mean(name, known)
            raise BucketingError(f"{config.optimizer} has no argument {name} for `optimizer_args`{hint}")
