"""Losses as per-sample values, and their one mean over processes and accumulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .errors import BucketingError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .packing import PackedLayout


def masked_mse(output: torch.Tensor, target: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean squared error of each sample of a batch; padding has no part in it, even when it is NaN.

    Args:
        output (`torch.Tensor` of shape `(B, …, T)`): Half precision is computed in float32.
        target (`torch.Tensor` of shape `(B, …, T)`): As `output`.
        lengths (`torch.Tensor` of shape `(B,)`, *optional*): Real positions along the last dimension, from 1 to `T`;
            without it all are.

    Returns:
        `torch.Tensor` of shape `(B,)`.

    Raises:
        BucketingError: If shapes differ.

    Example:
        >>> masked_mse(torch.tensor([[1.0, 3.0], [2.0, 9.0]]), torch.zeros(2, 2), torch.tensor([2, 1]))
        tensor([5., 4.])
    """
    if output.shape != target.shape or (lengths is not None and lengths.shape != output.shape[:1]):
        shape = None if lengths is None else tuple(lengths.shape)
        raise BucketingError(
            f"Expected output and target of one shape (B, …, T) and lengths of shape (B,), got {tuple(output.shape)}, "
            f"{tuple(target.shape)} and {shape}."
        )
    errors = _squared_error(output, target)
    if lengths is None:
        return errors.flatten(1).mean(1)
    real = torch.arange(output.shape[-1], device=output.device) < lengths[:, None]
    real = real.view(len(output), *[1] * (output.ndim - 2), -1)
    # Zero the inputs, not the error: a zero gradient times a NaN would be NaN.
    errors = _squared_error(torch.where(real, output, 0), torch.where(real, target, 0))
    return errors.flatten(1).sum(1) / real.expand_as(errors).flatten(1).sum(1)


def packed_mse(prediction: torch.Tensor, target: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Return the mean squared error of each sample of a pack, over its own tokens.

    Args:
        prediction (`torch.Tensor` of shape `(rows, channels, p_t, p_h, strip_length·p_w)`): Half precision is
            computed in float32.
        target (`torch.Tensor`): As `prediction`.
        layout ([`PackedLayout`][hf_bucketing.packing.PackedLayout]): Of the pack.

    Returns:
        `torch.Tensor` of shape `(n,)`.

    Raises:
        BucketingError: If the shapes differ or are not the layout's.
    """
    if prediction.shape != target.shape or prediction.shape[0] != layout.num_rows:
        raise BucketingError(
            f"Expected two tensors of {layout.num_rows} rows and one shape, got {tuple(prediction.shape)} and "
            f"{tuple(target.shape)}."
        )
    errors = _squared_error(prediction, target).unflatten(4, (layout.strip_length, -1)).mean((1, 2, 3, 5)).flatten()
    return torch.stack([errors[start:stop].mean() for start, stop in layout.spans])


def global_mean(
    values: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    accelerator: Accelerator | None = None,
    total: float | None = None,
) -> torch.Tensor:
    """Return a loss whose gradient is that of one weighted mean over all processes.

    DDP averages gradients over processes and `accelerator.backward` divides by the accumulation steps; both are
    undone here, so that a process or micro-batch of few samples does not weigh as much as one of many.

    Args:
        values (`torch.Tensor` of shape `(n,)`): This process's per-sample losses.
        weights (`torch.Tensor` of shape `(n,)`, *optional*): One per value; 1 without it.
        accelerator (`Accelerator`, *optional*): Without it there is one process and no accumulation.
        total (`float`, *optional*): Sum of the weights over all processes and the accumulation window, for example
            `plan.samples_in_steps(…)`. Without it, the weights of this micro-batch are summed over processes and the
            micro-batches of a window count alike.

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


def _squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(output.dtype, torch.float32)
    return (output.to(dtype) - target.to(dtype)).square()
