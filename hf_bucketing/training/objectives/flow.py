"""Flow matching: the model predicts the velocity from the sample to the noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ...errors import BucketingError
from ...losses import masked_mse, packed_mse
from ...packing import PackedBatch
from .base import Noised, sample_generator


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
