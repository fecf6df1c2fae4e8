"""The optimizer and its learning rate: AdamW, or its 8-bit form where bitsandbytes is installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from diffusers.optimization import get_scheduler

from ..errors import BucketingError
from .settings import OptimizerConfig


def make_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return an optimizer over the parameters that need a gradient.

    Raises:
        BucketingError: If bitsandbytes is needed and not installed, or no parameter needs a gradient.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise BucketingError("No parameter of the transformer needs a gradient; nothing would be trained.")
    kind: Any = torch.optim.AdamW
    if config.optimizer == "adamw_8bit":
        try:
            import bitsandbytes
        except ImportError as error:
            raise BucketingError(
                '`optimizer="adamw_8bit"` needs bitsandbytes: pip install "hf_bucketing[8bit]", '
                'or use `optimizer="adamw"`.'
            ) from error
        kind = bitsandbytes.optim.AdamW8bit
    optimizer: torch.optim.Optimizer = kind(trained, lr=config.learning_rate, **config.adam())
    return optimizer


def make_schedule(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, *, num_training_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the learning rate schedule over a number of optimizer steps."""
    return get_scheduler(
        config.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps=config.lr_warmup_steps,
        num_training_steps=num_training_steps,
    )


def apply_settings(config: OptimizerConfig, schedule: torch.optim.lr_scheduler.LambdaLR) -> None:
    """Give a schedule and its optimizer their present settings, which loading a checkpoint has replaced.

    The learning rate becomes the present one times the schedule's factor at the current step.
    """
    groups = schedule.optimizer.param_groups
    for group, factor in zip(groups, schedule.lr_lambdas, strict=True):
        group["initial_lr"] = config.learning_rate
        group["lr"] = config.learning_rate * factor(schedule.last_epoch)
        group.update(config.adam())
    schedule.base_lrs = [config.learning_rate] * len(schedule.lr_lambdas)
    schedule._last_lr = [group["lr"] for group in groups]  # the values that get_last_lr() returns
