"""From a collated batch to per-sample losses, for stacked batches and for packs."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from ..packing import Packing, packed_forward
from .objectives import Objective
from .recipes import Recipe

_IMAGE_FPS = 1.0
"""Frame rate of images, whose only frame lies at 0 seconds at any rate."""


class StepLosses(NamedTuple):
    """Losses of a batch.

    Attributes:
        values (`torch.Tensor` of shape `(n,)`): One per sample.
        noise_levels (`torch.Tensor` of shape `(n,)`): Timesteps over the schedule's length, in [0, 1].
    """

    values: torch.Tensor
    noise_levels: torch.Tensor


class Step(Protocol):
    """Computes the per-sample losses of a batch."""

    def __call__(self, transformer: torch.nn.Module, batch: dict[str, Any], *, epoch: int) -> StepLosses: ...


class BucketStep:
    """One forward over a stack of samples of one size."""

    def __init__(self, recipe: Recipe, objective: Objective) -> None:
        self.recipe = recipe
        self.objective = objective

    def __call__(self, transformer: torch.nn.Module, batch: dict[str, Any], *, epoch: int) -> StepLosses:
        """Return the loss of each sample."""
        latents = self.recipe.encode_latents(batch["pixel_values"])
        noised = self.objective(list(latents), indices=batch["index"], epoch=epoch)
        prediction = self.recipe.predict(
            transformer,
            torch.stack(noised.latents),
            timesteps=noised.timesteps,
            text=self.recipe.encode_text(batch["caption"]).to(latents.dtype),
            fps=_fps(batch, latents.device),
        )
        levels = noised.timesteps / self.objective.num_train_timesteps
        return StepLosses(self.objective.losses(prediction, noised), levels)


class PackStep:
    """One forward over a pack of samples, each of its own size."""

    def __init__(self, recipe: Recipe, objective: Objective, packing: Packing) -> None:
        self.recipe = recipe
        self.objective = objective
        self.packing = packing

    def __call__(self, transformer: torch.nn.Module, batch: dict[str, Any], *, epoch: int) -> StepLosses:
        """Return the loss of each sample."""
        latents = [self.recipe.encode_latents(pixels[None])[0] for pixels in batch["pixel_values"]]
        noised = self.objective(latents, indices=batch["index"], epoch=epoch)
        pack = self.packing.pack(
            noised.latents,
            timesteps=noised.timesteps,
            conditioning=self.recipe.conditioning(fps=_fps(batch, latents[0].device)),
            **self.recipe.encode_text(batch["caption"]).to(latents[0].dtype).pack_kwargs(),
        )
        values = self.objective.packed_losses(packed_forward(transformer, pack), noised, pack)
        return StepLosses(values, noised.timesteps / self.objective.num_train_timesteps)


def _fps(batch: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Return the frame rate of each sample, `(n,)`."""
    return torch.tensor([fps or _IMAGE_FPS for fps in batch["fps"]], device=device)
