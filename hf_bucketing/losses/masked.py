"""Losses of padded batches `(B, …, T)` with lengths: per-sample values without the padding."""

from __future__ import annotations

import torch

from ..errors import BucketingError


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
