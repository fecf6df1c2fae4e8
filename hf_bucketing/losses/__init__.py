"""Losses as per-sample values, and their one mean over processes and accumulation. Torch alone."""

from .masked import masked_mse, masked_snr
from .reduction import Reduction, global_mean, reduction_weights
from .variational import GaussianPosterior, batch_vlb, packed_vlb
from .weights import min_snr_weights

__all__ = [
    "GaussianPosterior",
    "Reduction",
    "batch_vlb",
    "global_mean",
    "masked_mse",
    "masked_snr",
    "min_snr_weights",
    "packed_vlb",
    "reduction_weights",
]
