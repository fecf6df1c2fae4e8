"""The flow-matching objective: one noise level per sample, drawn from the sample's own seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch


class Noised(NamedTuple):
    """Noisy latents, what the model is to predict, and its timesteps.

    Attributes:
        latents (list of `(C, F, H, W)`): `(1 − σ)·x + σ·noise`.
        targets (list of `(C, F, H, W)`): `noise − x`.
        timesteps (`float32`, shape `(n,)`): `σ · num_train_timesteps`.
    """

    latents: list[torch.Tensor]
    targets: list[torch.Tensor]
    timesteps: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowMatching:
    """Rectified flow (Liu et al., 2022; Lipman et al., 2022) with the resolution shift of SD3 (Esser et al., 2024).

    Args:
        num_train_timesteps (`int`): Timestep at σ = 1.
        shift (`float`): `σ → shift·σ / (1 + (shift − 1)·σ)`.
        weighting_scheme (`"logit_normal"` or `"uniform"`): Distribution of σ before the shift.
        seed (`int`): With epoch and index, the only source of noise and σ.
    """

    num_train_timesteps: int = 1000
    shift: float = 1.0
    weighting_scheme: Literal["logit_normal", "uniform"] = "logit_normal"
    seed: int = 0

    def __call__(self, latents: Sequence[torch.Tensor], *, indices: Sequence[int], epoch: int) -> Noised:
        """Add noise to each latent `(C, F, H, W)`; the same sample in the same epoch always gets the same."""
        noised, targets, sigmas = [], [], []
        for latent, index in zip(latents, indices, strict=True):
            sequence = np.random.SeedSequence((self.seed, epoch, index, 1))
            generator = torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))
            sigma = self._draw_sigma(generator)
            noise = torch.randn(latent.shape, generator=generator).to(latent)
            noised.append((1 - sigma) * latent + sigma * noise)
            targets.append(noise - latent)
            sigmas.append(sigma)
        timesteps = torch.tensor(sigmas, device=latents[0].device, dtype=torch.float32) * self.num_train_timesteps
        return Noised(noised, targets, timesteps)

    def _draw_sigma(self, generator: torch.Generator) -> float:
        if self.weighting_scheme == "logit_normal":
            sigma = torch.sigmoid(torch.randn((), generator=generator, dtype=torch.float64))
        else:
            sigma = torch.rand((), generator=generator, dtype=torch.float64)
        return float(self.shift * sigma / (1 + (self.shift - 1) * sigma))
