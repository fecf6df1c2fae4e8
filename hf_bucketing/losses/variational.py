"""The variational bound of models that predict their variance (Nichol & Dhariwal, 2021, "Improved DDPM").

The output of such a model has twice the latent's channels: the prediction of the mean, then that of the variance,
split along the channels of every patch. With the mean detached, the bound trains the variance alone; the mean squared
error beside it trains the mean. The sum is the hybrid loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from ..devices import to_device
from ..errors import BucketingError
from .per_sample import PredictionType, broadcast_weights, check_prediction_type, weighted_mean

VarianceType = Literal["learned_range", "learned"]


@dataclass(frozen=True, eq=False, kw_only=True)
class GaussianPosterior:
    """`q(x_{t−1} | x_t, x_0)` of a discrete noise schedule, in float64.

    Args:
        betas (`torch.Tensor` of shape `(T,)`): Variance of the noise that each step adds, between 0 and 1; that of the
            last step may be 1, which leaves pure noise (Lin et al., 2024, "zero terminal SNR").
        prediction_type (`"epsilon"`, `"v_prediction"` or `"sample"`): What the first half of the channels predicts.
        variance_type (`"learned_range"` or `"learned"`): Whether the second half interpolates between the smallest and
            the largest log-variance, or is the log-variance itself.

    Raises:
        BucketingError: If a type is unknown, a beta lies outside of its range, or the last one is 1 and noise is
            predicted, from which no `x_0` follows there.
    """

    betas: torch.Tensor
    prediction_type: PredictionType = "epsilon"
    variance_type: VarianceType = "learned_range"
    _tables: dict[str, torch.Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_prediction_type(self.prediction_type)
        if self.variance_type not in get_args(VarianceType):
            raise BucketingError(f"variance_type must be one of {get_args(VarianceType)}, got {self.variance_type!r}.")
        betas = self.betas.to(torch.float64)
        if (
            betas.ndim != 1
            or len(betas) < 2
            or not bool((betas > 0).all() & (betas[:-1] < 1).all() & (betas[-1] <= 1))
        ):
            raise BucketingError(f"Expected two or more betas between 0 and 1, got shape {tuple(betas.shape)}.")
        if betas[-1] == 1 and self.prediction_type == "epsilon":
            raise BucketingError(
                "The schedule ends in pure noise (rescale_betas_zero_snr), in which a model that predicts the noise "
                "learns nothing; its prediction_type must be 'v_prediction' or 'sample'."
            )
        alphas = 1 - betas
        after = alphas.cumprod(0)
        before = torch.cat([after.new_ones(1), after[:-1]])
        variance = betas * (1 - before) / (1 - after)
        tables = {
            "signal": after.sqrt(),
            "noise": (1 - after).sqrt(),
            "clean_weight": betas * before.sqrt() / (1 - after),
            "noised_weight": (1 - before) * alphas.sqrt() / (1 - after),
            # The first step's variance is 0; the second step's replaces it, as in the paper's code.
            "smallest": torch.cat([variance[1:2], variance[1:]]).log(),
            "largest": betas.log(),
        }
        object.__setattr__(self, "_tables", tables)

    @classmethod
    def from_scheduler(cls, scheduler: Any) -> GaussianPosterior:
        """Read betas, prediction type and variance type of a diffusers scheduler, such as `DDPMScheduler`.

        Schedulers that change the noise levels after computing them from their betas, as those of CogVideoX do, get
        the betas of these levels. A scheduler with a fixed variance is read as `"learned_range"`, because the model
        decides.

        Raises:
            BucketingError: If the scheduler has no betas.
        """
        if not hasattr(scheduler, "betas"):
            raise BucketingError(f"{type(scheduler).__name__} has no betas; a learned variance needs a DDPM schedule.")
        variance_type = scheduler.config.get("variance_type", "learned_range")
        return cls(
            betas=_betas_of(scheduler),
            prediction_type=scheduler.config.prediction_type,
            variance_type="learned" if variance_type == "learned" else "learned_range",
        )

    @property
    def num_timesteps(self) -> int:
        """Steps of the schedule."""
        return len(self.betas)

    def at(self, name: str, timesteps: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a coefficient for each timestep `(B,)`, of shape `(B, 1, …)` and in the dtype of `like`."""
        values = to_device(self._tables[name], like.device)[to_device(timesteps, like.device)]
        return values.to(like.dtype).view(-1, *[1] * (like.ndim - 1))


def batch_vlb(
    output: torch.Tensor,
    *,
    noised: torch.Tensor,
    clean: torch.Tensor,
    timesteps: torch.Tensor,
    posterior: GaussianPosterior,
    rescale: bool = True,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return each sample's term of the variational bound, in bits per dimension.

    Args:
        output (`torch.Tensor` of shape `(B, 2·C, …)`): The model's output; no gradient reaches its first half.
        noised (`torch.Tensor` of shape `(B, C, …)`): `x_t`.
        clean (`torch.Tensor` of shape `(B, C, …)`): `x_0`.
        timesteps (`torch.Tensor` of shape `(B,)`): `int64`, from 0; at 0 the term is the decoder's likelihood of `x_0`
            in 256 bins over [−1, 1].
        posterior ([`GaussianPosterior`]): The schedule, and what the model predicts.
        rescale (`bool`): Whether to multiply by `T ÷ 1000`, the weight beside the mean squared error in the hybrid
            loss.
        weights (`torch.Tensor`, *optional*): Weights of the values of `noised`, which broadcast to its shape, see
            [`masked_mse`].

    Returns:
        `torch.Tensor` of shape `(B,)`.

    Raises:
        BucketingError: If the shapes do not fit each other.
    """
    terms = vlb_terms(output, noised=noised, clean=clean, timesteps=timesteps, posterior=posterior, rescale=rescale)
    if weights is None:
        return terms.flatten(1).mean(1)
    weights = broadcast_weights(weights, terms)
    return weighted_mean((terms * weights).flatten(1).sum(1), weights.flatten(1).sum(1))


def vlb_terms(
    output: torch.Tensor,
    *,
    noised: torch.Tensor,
    clean: torch.Tensor,
    timesteps: torch.Tensor,
    posterior: GaussianPosterior,
    rescale: bool,
) -> torch.Tensor:
    """Return the terms of the variational bound, one per number of `noised`, in bits; see [`batch_vlb`]."""
    expected = (noised.shape[0], 2 * noised.shape[1], *noised.shape[2:])
    if noised.shape != clean.shape or tuple(output.shape) != expected:
        raise BucketingError(
            f"Expected x_t and x_0 of one shape and an output with twice their channels, got {tuple(noised.shape)}, "
            f"{tuple(clean.shape)} and {tuple(output.shape)}."
        )
    dtype = torch.promote_types(output.dtype, torch.float32)
    output, noised, clean = (values.to(dtype) for values in (output, noised, clean))
    mean_output, log_variance = output.chunk(2, dim=1)

    def at(name: str) -> torch.Tensor:
        return posterior.at(name, timesteps, noised)

    smallest, largest = at("smallest"), at("largest")
    if posterior.variance_type == "learned_range":
        fraction = (log_variance + 1) / 2
        log_variance = fraction * largest + (1 - fraction) * smallest
    predicted = _predicted_clean(mean_output.detach(), noised, at("signal"), at("noise"), posterior.prediction_type)
    mean = at("clean_weight") * predicted + at("noised_weight") * noised
    true_mean = at("clean_weight") * clean + at("noised_weight") * noised
    divergence = 0.5 * (
        log_variance
        - smallest
        - 1
        + (smallest - log_variance).exp()
        + (true_mean - mean).square() / log_variance.exp()
    )
    first = to_device(timesteps == 0, noised.device).view(-1, *[1] * (noised.ndim - 1))
    terms = torch.where(first, _decoder_cost(clean, mean, 0.5 * log_variance), divergence)
    scale = posterior.num_timesteps / 1000 if rescale else 1.0
    return terms * (scale / math.log(2))


def _betas_of(scheduler: Any) -> torch.Tensor:
    """Return a scheduler's betas, or those of its `alphas_cumprod` where these are not what its betas give."""
    betas, levels = scheduler.betas.to(torch.float64), scheduler.alphas_cumprod.to(torch.float64)
    if torch.allclose((1 - betas).cumprod(0), levels, rtol=1e-3, atol=1e-6):  # they may be rounded to float32
        return betas
    return 1 - levels / torch.cat([levels.new_ones(1), levels[:-1]])


def _predicted_clean(
    output: torch.Tensor, noised: torch.Tensor, signal: torch.Tensor, noise: torch.Tensor, prediction_type: str
) -> torch.Tensor:
    if prediction_type == "epsilon":
        return (noised - noise * output) / signal
    return signal * noised - noise * output if prediction_type == "v_prediction" else output


def _decoder_cost(clean: torch.Tensor, mean: torch.Tensor, log_deviation: torch.Tensor) -> torch.Tensor:
    """Return the negative log-probability that a Gaussian assigns to each value's bin, 1/255 to either side."""
    upper, lower = (_normal_cdf((clean - mean + side) * (-log_deviation).exp()) for side in (1 / 255, -1 / 255))
    inside = torch.where(clean > 0.999, 1 - lower, upper - lower)
    return -torch.where(clean < -0.999, upper, inside).clamp(min=1e-12).log()


def _normal_cdf(x: torch.Tensor) -> torch.Tensor:
    """Approximate the standard normal's cumulative distribution function, as the paper's code does."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
