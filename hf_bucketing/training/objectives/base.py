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


def sample_generator(*, seed: int, epoch: int, index: int) -> torch.Generator:
    """Return the generator of one sample's noise and timestep in one epoch.

    It is on the CPU, so that it draws the same on every device, in any batch and on any number of processes.

    Args:
        seed (`int`): Of the run, not negative.
        epoch (`int`): Not negative.
        index (`int`): The sample's row, not negative: the `index` of a batch.

    Raises:
        ValueError: On a negative number.

    Example:
        >>> draws = [torch.rand(1, generator=sample_generator(seed=0, epoch=1, index=7)) for _ in range(2)]
        >>> draws[0].equal(draws[1])
        True
    """
    sequence = np.random.SeedSequence((seed, epoch, index, 1))
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))
