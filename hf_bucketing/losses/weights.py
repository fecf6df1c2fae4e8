"""Per-sample weights of the loss by noise level."""

from __future__ import annotations

import torch

from ..errors import BucketingError


def min_snr_weights(snr: torch.Tensor, *, gamma: float = 5.0, prediction_type: str = "epsilon") -> torch.Tensor:
    """Return the min-SNR weight of each sample's mean squared error (Hang et al., 2023).

    The weight of the error in x0 is `min(snr, gamma)`; what the model predicts decides what that is for its own error.

    Args:
        snr (`torch.Tensor` of shape `(n,)`): `ᾱ_t ÷ (1 − ᾱ_t)` of each sample, as diffusers' `compute_snr` gives it.
        gamma (`float`): Largest weight of the error in x0.
        prediction_type (`"epsilon"`, `"v_prediction"` or `"sample"`): diffusers' names.

    Returns:
        `torch.Tensor` of shape `(n,)`: Finite also where `snr` is 0.

    Raises:
        BucketingError: On another prediction type, or a gamma that is not positive.

    Example:
        >>> min_snr_weights(torch.tensor([0.5, 10.0]), gamma=5.0)
        tensor([1.0000, 0.5000])
    """
    if gamma <= 0:
        raise BucketingError(f"gamma must be positive, got {gamma}.")
    if prediction_type == "epsilon":
        return (gamma / snr).clamp(max=1.0)
    if prediction_type == "v_prediction":
        return snr.clamp(max=gamma) / (snr + 1)
    if prediction_type == "sample":
        return snr.clamp(max=gamma)
    raise BucketingError(f'prediction_type must be "epsilon", "v_prediction" or "sample", got {prediction_type!r}.')
