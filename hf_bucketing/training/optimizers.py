"""The optimizer and its learning rate: AdamW, or its 8-bit form where bitsandbytes is installed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers.optimization import get_scheduler

from ..errors import BucketingError
from ..settings import check_at_least, check_literals


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate schedule.

    Args:
        optimizer (`"adamw"` or `"adamw_8bit"`): AdamW, or AdamW with its two moments in 8 bits (Dettmers et al.,
            2022), which needs bitsandbytes (extra 8bit).
        learning_rate (`float`): Learning rate that the schedule starts from, or warms up to.
        lr_scheduler (`str`): Learning rate schedule, one of diffusers'.
        lr_warmup_steps (`int`): Optimizer steps over which the learning rate rises from 0.
        adam_beta1 (`float`): AdamW beta1.
        adam_beta2 (`float`): AdamW beta2.
        adam_weight_decay (`float`): AdamW weight decay.
        adam_epsilon (`float`): AdamW epsilon.
        max_grad_norm (`float`): Norm to which gradients are clipped.
        max_skipped_steps (`int`): Consecutive optimizer steps whose loss or gradients are not finite that are skipped
            before the run fails; their samples are named. With 0, the first one ends the run.

    Raises:
        BucketingError: On an unknown name, a negative number, or a warm-up that the schedule does not have.
    """

    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    learning_rate: float = 1e-4
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = "constant"
    lr_warmup_steps: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_weight_decay: float = 1e-2
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    max_skipped_steps: int = 10

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(0, self, "lr_warmup_steps", "max_skipped_steps")
        if self.lr_warmup_steps and self.lr_scheduler == "constant":
            raise BucketingError('`lr_warmup_steps` needs another schedule: `lr_scheduler="constant_with_warmup"`.')

    @property
    def moment_bytes(self) -> int:
        """Bytes per number in each of the optimizer's two moments."""
        return 1 if self.optimizer == "adamw_8bit" else 4

    def adam(self) -> dict[str, Any]:
        """Return betas, weight decay and epsilon, as torch names them."""
        betas = (self.adam_beta1, self.adam_beta2)
        return {"betas": betas, "weight_decay": self.adam_weight_decay, "eps": self.adam_epsilon}


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
