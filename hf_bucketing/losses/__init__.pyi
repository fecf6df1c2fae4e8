from .names import Reduction as Reduction
from .per_sample import (
    PredictionType as PredictionType,
    global_mean as global_mean,
    masked_mse as masked_mse,
    masked_snr as masked_snr,
    min_snr_weights as min_snr_weights,
    reduction_weights as reduction_weights,
)
from .variational import GaussianPosterior as GaussianPosterior, batch_vlb as batch_vlb
