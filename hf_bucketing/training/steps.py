"""From a collated batch to per-sample losses, for stacked batches and for packs."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..losses import masked_mse, packed_mse
from ..packing import Packing, packed_forward
from .objective import FlowMatching
from .wan import WanRecipe


class Step(Protocol):
    """Computes the per-sample losses `(n,)` of a batch."""

    def __call__(self, transformer: torch.nn.Module, batch: dict[str, Any], *, epoch: int) -> torch.Tensor: ...


class BucketStep:
    """One forward over a stack of samples of one size."""

    def __init__(self, recipe: WanRecipe, objective: FlowMatching) -> None:
        self.recipe = recipe
        self.objective = objective

    def __call__(self, transformer: torch.nn.Module, batch: dict[str, Any], *, epoch: int) -> torch.Tensor:
        """Return the mean squared error of each sample."""
        latents = self.recipe.encode_latents(batch["pixel_values"])
        noised = self.objective(list(latents), indices=batch["index"], epoch=epoch)
        text = self.recipe.encode_text(batch["caption"]).to(latents.dtype)
        prediction = transformer(torch.stack(noised.latents), noised.timesteps, text, return_dict=False)[0]
        return masked_mse(prediction, torch.stack(noised.targets))


class PackStep:
    """One forward over a pack of samples, each of its own size."""

    def __init__(self, recipe: WanRecipe, objective: FlowMatching, packing: Packing) -> None:
        self.recipe = recipe
        self.objective = objective
        self.packing = packing

    def __call__(self, transformer: torch.nn.Module, batch: dict[str, Any], *, epoch: int) -> torch.Tensor:
        """Return the mean squared error of each sample."""
        latents = [self.recipe.encode_latents(pixels[None])[0] for pixels in batch["pixel_values"]]
        noised = self.objective(latents, indices=batch["index"], epoch=epoch)
        text = self.recipe.encode_text(batch["caption"]).to(latents[0].dtype)
        pack = self.packing.pack(noised.latents, timesteps=noised.timesteps, text=text)
        return packed_mse(packed_forward(transformer, pack), pack.pack_like(noised.targets), pack.layout)
