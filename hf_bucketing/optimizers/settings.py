"""Settings of the optimizer and its schedule."""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..errors import BucketingError
from ..settings import check_at_least, check_literals, setting

ADAMW = {"adamw": "torch.optim:AdamW", "adamw_8bit": "bitsandbytes.optim:AdamW8bit"}
"""Optimizers with a short name, which take the settings of AdamW."""

MUON = "torch.optim:Muon"
"""torch's optimizer of matrices; beside it, AdamW takes the other weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate schedule.

    Args:
        optimizer (`str`): `adamw`, `adamw_8bit`, which is AdamW with its two moments in 8 bits (Dettmers et al., 2022)
            and needs bitsandbytes (extra 8bit), or any installed class as `module:Class`, such as `torch.optim:Muon`,
            `prodigyopt:Prodigy` or `schedulefree:AdamWScheduleFree`.
        optimizer_args (list of `str`, *optional*): Arguments of that class as `key=value`, such as
            `betas=0.9,0.99 weight_decay=0.01`; by default those that the class has.
        learning_rate (`float`): Learning rate that the schedule starts from, or warms up to; 1 for optimizers that
            estimate it themselves, such as Prodigy.
        lora_plus_ratio (`float`, *optional*): Learning rate of the upper matrices of LoRA relative to the lower ones
            (LoRA+, Hayou et al., 2024, who found 16); by default they have the same.
        lr_scheduler (`str`): Learning rate schedule, one of diffusers'.
        lr_warmup_steps (`int`): Optimizer steps over which the learning rate rises from 0.
        adam_beta1 (`float`): AdamW beta1.
        adam_beta2 (`float`): AdamW beta2.
        adam_weight_decay (`float`): AdamW weight decay, of weights with two dimensions or more: biases, norms and
            magnitudes of DoRA do not decay.
        adam_epsilon (`float`): AdamW epsilon.
        max_grad_norm (`float`): Norm to which gradients are clipped.
        max_skipped_steps (`int`): Consecutive optimizer steps whose loss or gradients are not finite that are skipped
            before the run fails; their samples are named. With 0, the first one ends the run.

    Raises:
        BucketingError: On an unknown name, a negative number, a warm-up that the schedule does not have, or settings
            of another optimizer.
    """

    optimizer: str = setting("adamw", on_resume="equal", planned=True)
    optimizer_args: list[str] | None = setting(None, on_resume="equal")
    learning_rate: float = setting(1e-4, common=True)
    lora_plus_ratio: float | None = setting(None, on_resume="equal")
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = "constant"
    lr_warmup_steps: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_weight_decay: float = 1e-2
    adam_epsilon: float = 1e-8
    max_grad_norm: float = setting(1.0, infinite=True)
    max_skipped_steps: int = 10

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(0, self, "lr_warmup_steps", "max_skipped_steps")
        if self.lr_warmup_steps and self.lr_scheduler == "constant":
            raise BucketingError('`lr_warmup_steps` needs another schedule: `lr_scheduler="constant_with_warmup"`.')
        if self.lora_plus_ratio is not None and self.lora_plus_ratio <= 0:
            raise BucketingError(f"`lora_plus_ratio` must be greater than 0, got {self.lora_plus_ratio}.")
        if self.optimizer not in ADAMW and not all(self.optimizer.partition(":")):
            raise BucketingError(
                f'`optimizer` must be {" or ".join(ADAMW)}, or a class as "module:Class", got {self.optimizer!r}.'
            )
        if self.optimizer in ADAMW and self.optimizer_args:
            raise BucketingError(
                f'`optimizer_args` are those of a class, such as `optimizer="torch.optim:AdamW"`; {self.optimizer} '
                "takes `adam_beta1`, `adam_beta2`, `adam_weight_decay` and `adam_epsilon`."
            )
        adam = {field.name: field.default for field in fields(self) if field.name.startswith("adam_")}
        changed = [name for name, default in adam.items() if getattr(self, name) != default]
        if changed and self.optimizer not in (*ADAMW, MUON):
            raise BucketingError(f"`{changed[0]}` is AdamW's; give {self.optimizer} its own with `optimizer_args`.")
        self.arguments()

    def adam(self) -> dict[str, Any]:
        """Return betas, weight decay and epsilon, as torch names them."""
        betas = (self.adam_beta1, self.adam_beta2)
        return {"betas": betas, "weight_decay": self.adam_weight_decay, "eps": self.adam_epsilon}

    def arguments(self) -> dict[str, Any]:
        """Return what the optimizer's class is called with, beside the weights and the learning rate.

        Raises:
            BucketingError: If `optimizer_args` are not of the form key=value.

        Example:
            >>> OptimizerConfig(optimizer="torch.optim:SGD", optimizer_args=["momentum=0.9"]).arguments()
            {'momentum': 0.9}
        """
        if self.optimizer in ADAMW:
            return self.adam()
        arguments = {}
        for text in self.optimizer_args or ():
            name, equals, value = text.partition("=")
            if not equals or not name.isidentifier():
                raise BucketingError(f"`optimizer_args` have the form key=value, got {text!r}.")
            arguments[name] = _value_of(value)
        return arguments


def _value_of(text: str) -> Any:
    """Return a number, truth value, None or tuple that a text holds, or else the text."""
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text, text))
    except (ValueError, SyntaxError):
        return text
