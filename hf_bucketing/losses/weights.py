"""Per-sample weights of the loss by noise level."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from ..errors import BucketingError

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
