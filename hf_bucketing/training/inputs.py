"""Latents and texts of a batch: from its cache, or encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..models.recipe import Recipe, TextEmbeddings


def latents_of(recipe: Recipe, batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the latents `(C, f, h, w)` of each sample of a batch of any collator."""
    if "latents" in batch:
        return list(batch["latents"])
    pixels = batch["pixel_values"]
    if isinstance(pixels, torch.Tensor):
        return list(recipe.encode_latents(pixels))
    return [recipe.encode_latents(sample[None])[0] for sample in pixels]


def text_of(
    recipe: Recipe, batch: Mapping[str, Any], *, dropped: Sequence[bool], empty: TextEmbeddings | None
) -> TextEmbeddings:
    """Return the text of each sample of a batch of any collator.

    Args:
        recipe ([`Recipe`]): Encodes what is not cached.
        batch (mapping): From a collator.
        dropped (sequence of `bool`): Which samples get the empty caption instead of theirs.
        empty ([`TextEmbeddings`], *optional*): The empty caption, `(1, length, dim)`, for batches from a cache.
    """
    if "text_values" not in batch:
        captions = zip(batch["caption"], dropped, strict=True)
        return recipe.encode_text(["" if drop else caption for caption, drop in captions])
    values, mask = batch["text_values"], batch.get("text_mask")
    if not any(dropped):
        return TextEmbeddings(values, mask)
    assert empty is not None, "make_data reads it from the cache"
    drops = torch.tensor(dropped, device=values.device)
    values = torch.where(drops[:, None, None], empty.values.to(values), values)
    if mask is not None and empty.mask is not None:
        mask = torch.where(drops[:, None], empty.mask.to(mask), mask)
    return TextEmbeddings(values, mask)
