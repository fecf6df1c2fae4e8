"""Weights of samples in the loss, by noise level or tokens, and from their values to one mean over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

from ..errors import BucketingError
from .names import Reduction

if TYPE_CHECKING:
    from accelerate import Accelerator

PredictionType = Literal["epsilon", "v_prediction", "sample"]
"""What a denoising model predicts, in diffusers' names."""


def min_snr_weights(
    snr: torch.Tensor, *, gamma: float = 5.0, prediction_type: PredictionType = "epsilon"
) -> torch.Tensor:
    """Return the min-SNR weight of each sample's mean squared error (Hang et al., 2023).

    The weight of the error in x0 is `min(snr, gamma)`; what the model predicts determines the weight of its own error.

    Args:
        snr (`torch.Tensor` of shape `(n,)`): `ᾱ_t ÷ (1 − ᾱ_t)` of each sample, as diffusers' `compute_snr` gives it.
        gamma (`float`): Largest weight of the error in x0, above 0.
        prediction_type (`"epsilon"`, `"v_prediction"` or `"sample"`): What the model predicts.

    Returns:
        `torch.Tensor` of shape `(n,)`: Finite also where `snr` is 0.

    Raises:
        BucketingError: If the prediction type is unknown, or gamma is not positive.

    Example:
        >>> min_snr_weights(torch.tensor([0.5, 10.0]), gamma=5.0)
        tensor([1.0000, 0.5000])
    """
    if gamma <= 0:
        raise BucketingError(f"gamma must be positive, got {gamma}.")
    check_prediction_type(prediction_type)
    if prediction_type == "epsilon":
        return (gamma / snr).clamp(max=1.0)
    capped = snr.clamp(max=gamma)
    return capped / (snr + 1) if prediction_type == "v_prediction" else capped


def check_prediction_type(name: str) -> None:
    """Raise BucketingError if there is no such [`PredictionType`]."""
    if name not in get_args(PredictionType):
        raise BucketingError(f"prediction_type must be one of {get_args(PredictionType)}, got {name!r}.")


def reduction_weights(num_tokens: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Return the weight of each sample's mean loss in the global mean.

    Args:
        num_tokens (`torch.Tensor` of shape `(n,)`): Tokens of each sample.
        reduction (`"sample"` or `"token"`): Whether every sample has the same weight, or every token.

    Returns:
        `torch.Tensor` of shape `(n,)`: In float64, because sums of token counts exceed what float32 holds exactly.

    Raises:
        BucketingError: If the reduction is unknown.
    """
    if reduction not in get_args(Reduction):
        raise BucketingError(f"reduction must be one of {get_args(Reduction)}, got {reduction!r}.")
    weights = num_tokens.to(torch.float64)
    return torch.ones_like(weights) if reduction == "sample" else weights


def global_mean(
    values: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    accelerator: Accelerator | None = None,
    total: float | None = None,
) -> torch.Tensor:
    """Return a loss with the gradient of one weighted mean over all processes.

    DDP averages gradients over processes and `accelerator.backward` divides by the accumulation steps. This function
    cancels both, so that a process or micro-batch of few samples does not weigh as much as one of many.

    Args:
        values (`torch.Tensor` of shape `(n,)`): This process's per-sample losses.
        weights (`torch.Tensor` of shape `(n,)`, *optional*): One per value. By default, 1.
        accelerator (`Accelerator`, *optional*): Source of the numbers of processes and accumulation steps. By default,
            there is one process and no accumulation.
        total (`float`, *optional*): Sum of the weights over all processes and the accumulation window, for example
            `plan.samples_in_steps(…)`. By default, the weights of this micro-batch are summed over processes, and the
            micro-batches of a window have equal weight.

    Returns:
        `torch.Tensor`: A scalar for `accelerator.backward`.

    Raises:
        BucketingError: If weights and values differ in shape.
    """
    weights = torch.ones_like(values) if weights is None else weights
    if values.ndim != 1 or weights.shape != values.shape:
        raise BucketingError(
            f"Expected values and weights of one shape (n,), got {tuple(values.shape)} and {tuple(weights.shape)}."
        )
    num_processes = 1 if accelerator is None else accelerator.num_processes
    micro_batches = 1 if accelerator is None else accelerator.gradient_accumulation_steps
    if total is None:
        summed = weights.detach().sum()
        summed = summed if accelerator is None else accelerator.reduce(summed, "sum")
        return (values * weights).sum() * num_processes / summed
    return (values * weights).sum() * num_processes * micro_batches / total
