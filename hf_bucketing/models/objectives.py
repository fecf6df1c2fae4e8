"""What every objective does: noise drawn from a sample's own seed, and per-sample losses of stacks and packs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from ..errors import BucketingError
from ..losses.masked import masked_mse
from ..losses.variational import GaussianPosterior, batch_vlb, packed_vlb
from ..losses.weights import min_snr_weights
from ..packing.losses import packed_mse
from ..packing.pack import PackedBatch
from ..randomness import Purpose, integer_seed


class Noised(NamedTuple):
    """Noisy latents, what the model is to predict, and its timesteps.

    Attributes:
        latents (list of `(C, F, H, W)`): What the model gets.
        targets (list of `(C, F, H, W)`): What it is to predict.
        timesteps (`torch.Tensor` of shape `(n,)`): As the model takes them.
        clean (list of `(C, F, H, W)`): What the noise was added to.
    """

    latents: list[torch.Tensor]
    targets: list[torch.Tensor]
    timesteps: torch.Tensor
    clean: list[torch.Tensor]


class Objective(Protocol):
    """Adds noise, and scores predictions."""

    @property
    def num_train_timesteps(self) -> int:
        """The timestep of pure noise, or one more."""

    def __call__(self, latents: Sequence[torch.Tensor], *, indices: Sequence[int], epoch: int) -> Noised:
        """Add noise to each latent `(C, F, H, W)`; the same sample in the same epoch always gets the same."""

    def losses(self, prediction: torch.Tensor, noised: Noised) -> torch.Tensor:
        """Return the loss of each sample of a stack `(B, C_out, F, H, W)`: `(B,)`."""

    def packed_losses(self, prediction: torch.Tensor, noised: Noised, pack: PackedBatch) -> torch.Tensor:
        """Return the loss of each sample of a pack, from what `packed_forward` returned: `(n,)`."""


def sample_generator(*, seed: int, epoch: int, index: int) -> torch.Generator:
    """Return the generator of one sample's noise and timestep in one epoch.

    It is on the CPU, so that it draws the same on every device, in any batch and on any number of processes.

    Args:
        seed (`int`): Of the run, not negative.
        epoch (`int`): Not negative.
        index (`int`): The sample's row, not negative: the `index` of a batch.

    Raises:
        BucketingError: On a negative number.

    Example:
        >>> draws = [torch.rand(1, generator=sample_generator(seed=0, epoch=1, index=7)) for _ in range(2)]
        >>> draws[0].equal(draws[1])
        True
    """
    return torch.Generator().manual_seed(integer_seed(Purpose.NOISE, seed, epoch, index))


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoising:
    """DDPM (Ho et al., 2020) on a discrete schedule, with the hybrid loss for models that predict their variance.

    The noisy latent is `√ᾱ_t·x + √(1 − ᾱ_t)·noise`. A model whose output has twice the latent's channels predicts its
    variance in the second half, which the variational bound trains (Nichol & Dhariwal, 2021).

    Args:
        posterior ([`GaussianPosterior`][hf_bucketing.losses.GaussianPosterior]): The schedule, and what is predicted.
        snr_gamma (`float`, *optional*): Weigh the squared error by min-SNR with this gamma.
        seed (`int`): With epoch and index, the only source of noise and timesteps.
    """

    posterior: GaussianPosterior
    snr_gamma: float | None = None
    seed: int = 0

    @property
    def num_train_timesteps(self) -> int:
        """Steps of the schedule."""
        return self.posterior.num_timesteps

    def __call__(self, latents: Sequence[torch.Tensor], *, indices: Sequence[int], epoch: int) -> Noised:
        """Add noise to each latent `(C, F, H, W)`; the same sample in the same epoch always gets the same."""
        noised, targets, steps = [], [], []
        for latent, index in zip(latents, indices, strict=True):
            generator = sample_generator(seed=self.seed, epoch=epoch, index=index)
            step = torch.randint(self.posterior.num_timesteps, (1,), generator=generator)
            noise = torch.randn(latent.shape, generator=generator).to(latent)
            signal, spread = (self.posterior.at(name, step, latent) for name in ("signal", "noise"))
            noised.append((signal * latent[None] + spread * noise)[0])
            velocity = (signal * noise - spread * latent[None])[0]
            targets.append({"epsilon": noise, "v_prediction": velocity}.get(self.posterior.prediction_type, latent))
            steps.append(step)
        return Noised(noised, targets, torch.cat(steps).to(latents[0].device), list(latents))

    def losses(self, prediction: torch.Tensor, noised: Noised) -> torch.Tensor:
        """Return the loss of each sample of a stack, `(B,)`."""
        targets = torch.stack(noised.targets)
        mean, learns_variance = self._split(prediction, targets)
        values = masked_mse(mean, targets) * self._weights(noised.timesteps)
        if not learns_variance:
            return values
        return values + batch_vlb(
            prediction,
            noised=torch.stack(noised.latents),
            clean=torch.stack(noised.clean),
            timesteps=noised.timesteps,
            posterior=self.posterior,
        )

    def packed_losses(self, prediction: torch.Tensor, noised: Noised, pack: PackedBatch) -> torch.Tensor:
        """Return the loss of each sample of a pack, `(n,)`."""
        targets = pack.pack_like(noised.targets)
        mean, learns_variance = self._split(prediction, targets)
        values = packed_mse(mean, targets, pack.layout) * self._weights(noised.timesteps)
        if not learns_variance:
            return values
        return values + packed_vlb(
            prediction,
            pack.layout,
            noised=pack.pack_like(noised.latents),
            clean=pack.pack_like(noised.clean),
            timesteps=noised.timesteps,
            posterior=self.posterior,
        )

    def _split(self, prediction: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the prediction of the mean, and whether one of the variance comes after it."""
        channels = targets.shape[1]
        if prediction.shape[1] not in (channels, 2 * channels):
            raise BucketingError(
                f"The model predicts {prediction.shape[1]} channels for latents of {channels}; expected as many, or "
                "twice as many with a learned variance."
            )
        return prediction[:, :channels], prediction.shape[1] > channels

    def _weights(self, timesteps: torch.Tensor) -> torch.Tensor | float:
        if self.snr_gamma is None:
            return 1.0
        signal, spread = (self.posterior.at(name, timesteps, timesteps.float()) for name in ("signal", "noise"))
        snr = signal.square() / spread.square()
        return min_snr_weights(snr, gamma=self.snr_gamma, prediction_type=self.posterior.prediction_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowMatching:
    """Rectified flow (Liu et al., 2022; Lipman et al., 2022) with the resolution shift of SD3 (Esser et al., 2024).

    The noisy latent is `(1 − σ)·x + σ·noise`, the target `noise − x`, the timestep `σ · num_train_timesteps`.

    Args:
        num_train_timesteps (`int`): Timestep at σ = 1.
        shift (`float`, or callable of a latent's `(F, H, W)`): `σ → shift·σ / (1 + (shift − 1)·σ)`.
        weighting_scheme (`"logit_normal"` or `"uniform"`): Distribution of σ before the shift.
        sigmas (`tuple[float, float]`): Noise levels that are trained, after the shift: from the first to the second.
            Others are drawn anew.
        seed (`int`): With epoch and index, the only source of noise and σ.

    Raises:
        BucketingError: If `sigmas` are not two rising levels from 0 to 1.
    """

    num_train_timesteps: int = 1000
    shift: float | Callable[[tuple[int, ...]], float] = 1.0
    weighting_scheme: Literal["logit_normal", "uniform"] = "logit_normal"
    sigmas: tuple[float, float] = (0.0, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.sigmas[0] < self.sigmas[1] <= 1:
            raise BucketingError(f"Noise levels go from 0 to 1, and up, got {self.sigmas}.")

    def __call__(self, latents: Sequence[torch.Tensor], *, indices: Sequence[int], epoch: int) -> Noised:
        """Add noise to each latent `(C, F, H, W)`; the same sample in the same epoch always gets the same."""
        noised, targets, sigmas = [], [], []
        for latent, index in zip(latents, indices, strict=True):
            generator = sample_generator(seed=self.seed, epoch=epoch, index=index)
            sigma = self._draw_sigma(generator, tuple(latent.shape[1:]))
            noise = torch.randn(latent.shape, generator=generator).to(latent)
            noised.append((1 - sigma) * latent + sigma * noise)
            targets.append(noise - latent)
            sigmas.append(sigma)
        timesteps = torch.tensor(sigmas, device=latents[0].device, dtype=torch.float32) * self.num_train_timesteps
        return Noised(noised, targets, timesteps, list(latents))

    def losses(self, prediction: torch.Tensor, noised: Noised) -> torch.Tensor:
        """Return the mean squared error of each sample of a stack, `(B,)`."""
        return masked_mse(prediction, torch.stack(noised.targets))

    def packed_losses(self, prediction: torch.Tensor, noised: Noised, pack: PackedBatch) -> torch.Tensor:
        """Return the mean squared error of each sample of a pack, `(n,)`."""
        return packed_mse(prediction, pack.pack_like(noised.targets), pack.layout)

    def _draw_sigma(self, generator: torch.Generator, size: tuple[int, ...]) -> float:
        shift = self.shift(size) if callable(self.shift) else self.shift
        while True:
            if self.weighting_scheme == "logit_normal":
                drawn = torch.sigmoid(torch.randn((), generator=generator, dtype=torch.float64))
            else:
                drawn = torch.rand((), generator=generator, dtype=torch.float64)
            sigma = float(shift * drawn / (1 + (shift - 1) * drawn))
            if self.sigmas[0] <= sigma <= self.sigmas[1]:
                return sigma
