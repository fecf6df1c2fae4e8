"""From a collated batch to per-sample losses, for stacked batches and for packs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..media.sample import frame_rates
from ..models.enable import disable_packing, enable_packing
from ..models.objectives import Objective
from ..models.recipe import Recipe, TextEmbeddings
from ..packing.pack import Packing, packed_forward
from ..randomness import Purpose, generator
from .inputs import latents_of, text_of


class StepLosses(NamedTuple):
    """Losses of a batch.

    Attributes:
        values (`torch.Tensor` of shape `(n,)`): One per sample.
        noise_levels (`torch.Tensor` of shape `(n,)`): Timesteps over the schedule's length, in [0, 1].
    """

    values: torch.Tensor
    noise_levels: torch.Tensor


@dataclass(kw_only=True)
class Step(ABC):
    """Computes the per-sample losses of a batch.

    Args:
        recipe ([`Recipe`]): Encodes.
        objective ([`Objective`]): Adds noise and scores.
        caption_dropout (`float`): Share of the captions that are replaced by an empty one, for classifier-free
            guidance; drawn from the seed, the epoch and the sample's index.
        seed (`int`): Of that draw.
        empty_text ([`TextEmbeddings`], *optional*): The empty caption, for batches whose texts come from a cache.
    """

    recipe: Recipe
    objective: Objective
    caption_dropout: float = 0.0
    seed: int = 0
    empty_text: TextEmbeddings | None = None

    @abstractmethod
    def __call__(self, transformer: torch.nn.Module, batch: Mapping[str, Any], *, epoch: int) -> StepLosses:
        """Return the loss of each sample."""

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """Let the pipeline use its transformer inside a `with` block."""
        yield

    def _text(self, batch: Mapping[str, Any], dtype: torch.dtype, *, epoch: int) -> TextEmbeddings:
        dropped = [self._drops_caption(index, epoch) for index in batch["index"]]
        return text_of(self.recipe, batch, dropped=dropped, empty=self.empty_text).to(dtype)

    def _drops_caption(self, index: int, epoch: int) -> bool:
        return bool(generator(Purpose.CAPTION_DROPOUT, self.seed, epoch, index).random() < self.caption_dropout)


class BucketStep(Step):
    """One forward over a stack of samples of one size."""

    def __call__(self, transformer: torch.nn.Module, batch: Mapping[str, Any], *, epoch: int) -> StepLosses:
        """Return the loss of each sample."""
        latents = latents_of(self.recipe, batch)
        noised = self.objective(latents, indices=batch["index"], epoch=epoch)
        prediction = self.recipe.predict(
            transformer,
            torch.stack(noised.latents),
            timesteps=noised.timesteps,
            text=self._text(batch, latents[0].dtype, epoch=epoch),
            fps=frame_rates(batch["fps"], device=latents[0].device),
        )
        levels = noised.timesteps / self.objective.num_train_timesteps
        return StepLosses(self.objective.losses(prediction, noised), levels)


@dataclass(kw_only=True)
class PackStep(Step):
    """One forward over a pack of samples, each of its own size.

    Args:
        packing ([`Packing`][hf_bucketing.packing.Packing]): Of the recipe's transformer.
    """

    packing: Packing

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """Switch packing off inside a `with` block."""
        transformer = self.recipe.transformer
        disable_packing(transformer)
        try:
            yield
        finally:
            self.packing = enable_packing(transformer, strip_length=self.packing.strip_length)

    def __call__(self, transformer: torch.nn.Module, batch: Mapping[str, Any], *, epoch: int) -> StepLosses:
        """Return the loss of each sample."""
        latents = latents_of(self.recipe, batch)
        noised = self.objective(latents, indices=batch["index"], epoch=epoch)
        pack = self.packing.pack(
            noised.latents,
            timesteps=noised.timesteps,
            conditioning=self.recipe.conditioning(fps=frame_rates(batch["fps"], device=latents[0].device)),
            **self._text(batch, latents[0].dtype, epoch=epoch).pack_kwargs(),
        )
        values = self.objective.packed_losses(packed_forward(transformer, pack), noised, pack)
        return StepLosses(values, noised.timesteps / self.objective.num_train_timesteps)
