"""Losses of samples: values without the padding of a batch, their weights, and their one mean over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

from ..errors import BucketingError
from .names import Reduction

if TYPE_CHECKING:
    from accelerate import Accelerator


def masked_mse(
    output: torch.Tensor,
    target: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mean squared error of each sample of a batch; padding does not enter it, even when it is NaN.

    Args:
        output (`torch.Tensor` of shape `(B, …, T)`): Half precision is computed in float32.
        target (`torch.Tensor` of shape `(B, …, T)`): Half precision is computed in float32.
        lengths (`torch.Tensor` of shape `(B,)`, *optional*): Real values along the last dimension, from 1 to `T`. By
            default, `T`.
        weights (`torch.Tensor` of a shape like `(B, …, T)`, *optional*): Weights or a mask, at least 0; a
            sample's loss is its weighted mean, and 0 if all its weights are. By default, all values weigh the same.

    Returns:
        `torch.Tensor` of shape `(B,)`.

    Raises:
        BucketingError: If shapes differ.

    Example:
        >>> masked_mse(torch.tensor([[1.0, 3.0], [2.0, 9.0]]), torch.zeros(2, 2), torch.tensor([2, 1]))
        tensor([5., 4.])
        >>> masked_mse(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2), weights=torch.tensor([[0.0, 2.0]]))
        tensor([9.])
    """
    output, target, real = _real(output, target, lengths)
    squared = (output - target).square()
    if weights is None:
        return squared.flatten(1).sum(1) / real
    weights = broadcast_weights(weights, squared)
    if lengths is not None:
        weights = _real(weights, weights, lengths)[0]
    return weighted_mean((squared * weights).flatten(1).sum(1), weights.flatten(1).sum(1))


def broadcast_weights(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return weights in the shape and the dtype of the values that they weigh.

    Raises:
        BucketingError: If they do not broadcast to that shape.
    """
    try:
        return weights.to(values).expand_as(values)
    except RuntimeError as error:
        shapes = f"weights of shape {tuple(weights.shape)} for values of shape {tuple(values.shape)}"
        raise BucketingError(f"Expected weights that broadcast to the values, got {shapes}.") from error


def weighted_mean(sums: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return weighted sums over the sums of their weights, 0 where these are 0."""
    return torch.where(weights > 0, sums / weights.clamp(min=torch.finfo(weights.dtype).tiny), 0)


def masked_snr(output: torch.Tensor, target: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Return the signal-to-noise ratio of each sample of a batch, in dB; a loss is its negative.

    `10·log10(Σ target² ÷ Σ (target − output)²)` over the real values of each channel, that is along the last
    dimension, and the mean of these over channels. Padding does not enter it, even when it is NaN. A small constant
    keeps silent targets and perfect outputs finite. Arguments, shapes and errors are those of [`masked_mse`].

    Example:
        A signal of power 100 with an error of power 1:

        >>> masked_snr(torch.tensor([[11.0, 5.0]]), torch.tensor([[10.0, 0.0]]), torch.tensor([1]))
        tensor([20.0000])
    """
    output, target, _ = _real(output, target, lengths)
    signal, noise = (values.square().sum(-1) for values in (target, target - output))
    tiny = torch.finfo(signal.dtype).eps
    ratios = 10 * torch.log10((signal + tiny) / (noise + tiny))
    return ratios.reshape(len(ratios), -1).mean(1)


def _real(
    output: torch.Tensor, target: torch.Tensor, lengths: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output and target in at least float32, zero in the padding, and each sample's number of real values."""
    if output.shape != target.shape or (lengths is not None and lengths.shape != output.shape[:1]):
        shape = None if lengths is None else tuple(lengths.shape)
        raise BucketingError(
            f"Expected output and target of one shape (B, …, T) and lengths of shape (B,), got {tuple(output.shape)}, "
            f"{tuple(target.shape)} and {shape}."
        )
    dtype = torch.promote_types(output.dtype, torch.float32)
    output, target = output.to(dtype), target.to(dtype)
    count = output[:1].numel() // output.shape[-1]
    if lengths is None:
        return output, target, torch.full(output.shape[:1], count * output.shape[-1], device=output.device)
    real = torch.arange(output.shape[-1], device=output.device) < lengths[:, None]
    real = real.view(len(output), *[1] * (output.ndim - 2), -1)
    # Zero the inputs, not the error: a zero gradient times a NaN would be NaN.
    return torch.where(real, output, 0), torch.where(real, target, 0), lengths * count


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
