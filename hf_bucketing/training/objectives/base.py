"""What every objective does: noise drawn from a sample's own seed, and per-sample losses of stacks and packs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ...packing import PackedBatch


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


def generator_of(*, seed: int, epoch: int, index: int) -> torch.Generator:
    """Return the generator of one sample's noise in one epoch, on the CPU: the same on every device and process."""
    sequence = np.random.SeedSequence((seed, epoch, index, 1))
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))
