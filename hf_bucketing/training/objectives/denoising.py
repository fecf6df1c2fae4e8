"""Denoising diffusion: the model predicts the noise, the velocity or the clean latent, and possibly its variance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...errors import BucketingError
from ...losses import GaussianPosterior, batch_vlb, masked_mse, min_snr_weights, packed_mse, packed_vlb
from ...packing import PackedBatch
from .base import Noised, sample_generator


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
