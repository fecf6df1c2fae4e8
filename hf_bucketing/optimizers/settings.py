"""Settings of the optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..errors import BucketingError
from ..settings import check_at_least, check_literals, setting


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

    optimizer: Literal["adamw", "adamw_8bit"] = setting("adamw", on_resume="equal")
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
