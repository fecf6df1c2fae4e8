"""Latents and texts of a batch: from its cache, or encoded."""

from __future__ import annotations

from typing import Any

import torch

from .recipes import Recipe, TextEmbeddings


def latents_of(recipe: Recipe, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Return the latents `(C, f, h, w)` of each sample of a batch of any collator."""
    if "latents" in batch:
        return list(batch["latents"])
    pixels = batch["pixel_values"]
    if isinstance(pixels, torch.Tensor):
        return list(recipe.encode_latents(pixels))
    return [recipe.encode_latents(sample[None])[0] for sample in pixels]


def text_of(recipe: Recipe, batch: dict[str, Any]) -> TextEmbeddings:
    """Return the text of each sample of a batch of any collator."""
    if "text_values" in batch:
        return TextEmbeddings(batch["text_values"], batch.get("text_mask"))
    return recipe.encode_text(batch["caption"])
