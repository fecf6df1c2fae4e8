"""How Chroma is trained: flow matching, shifted by size; text masked but for one token of its padding."""

from __future__ import annotations

import torch

from ..flux.recipe import FluxRecipe
from ..samples import Samples
from .packing import FAMILY


class ChromaRecipe(FluxRecipe):
    """Recipe of `ChromaPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe]."""

    pipeline_class = "ChromaPipeline"
    family = FAMILY
    prompt_outputs = ("values", "", "mask")

    def refusal(self, samples: Samples) -> str | None:
        """Refuse masked stacks with gradient checkpointing, under which the stock model drops the mask."""
        mask = samples.text.mask
        checkpointing = self.transformer.gradient_checkpointing and torch.is_grad_enabled()
        if checkpointing and mask is not None and not bool(mask.all()):
            return (
                "With gradient checkpointing, diffusers' Chroma passes no text mask to its single blocks; train packs "
                '(`batching="pack"`), which need no mask, or omit `gradient_checkpointing`.'
            )
        return super().refusal(samples)


RECIPES = (ChromaRecipe,)
