"""Losses as per-sample values, and their one mean over processes and accumulation. They need torch alone."""

from .masked import masked_mse, masked_snr
from .reduction import Reduction, global_mean, reduction_weights
from .variational import GaussianPosterior, batch_vlb
from .weights import PredictionType, min_snr_weights

__all__ = [
    "GaussianPosterior",
    "PredictionType",
    "Reduction",
    "batch_vlb",
    "global_mean",
    "masked_mse",
    "masked_snr",
    "min_snr_weights",
    "reduction_weights",
]
