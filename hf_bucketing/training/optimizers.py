"""The optimizer: AdamW, or its 8-bit form where bitsandbytes is installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from ..errors import BucketingError

OptimizerName = Literal["adamw", "adamw_8bit"]


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter],
    *,
    name: OptimizerName,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
) -> torch.optim.Optimizer:
    """Return an optimizer over the parameters that are trained.

    Args:
        parameters (iterable of `torch.nn.Parameter`): Those that need no gradient are left out.
        name (`"adamw"` or `"adamw_8bit"`): The second holds its two moments in 8 bits (Dettmers et al., 2022).
        lr (`float`): Learning rate.
        betas (`tuple` of two `float`): Of the moments.
        weight_decay (`float`): Decoupled.
        eps (`float`): Added to the denominator.

    Raises:
        BucketingError: If bitsandbytes is asked for and not installed, or nothing is to be trained.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise BucketingError("No parameter of the transformer needs a gradient; nothing would be trained.")
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=lr, betas=betas, weight_decay=weight_decay, eps=eps)
    try:
        import bitsandbytes
    except ImportError as error:
        raise BucketingError(
            '`optimizer="adamw_8bit"` needs bitsandbytes: pip install "hf_bucketing[8bit]", '
            'or use `optimizer="adamw"`.'
        ) from error
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        trained, lr=lr, betas=betas, weight_decay=weight_decay, eps=eps
    )
    return optimizer
