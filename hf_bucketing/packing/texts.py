"""The texts of a pack: their padding, and captions that several samples share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import PackingError
from .family import TextRule


def padded_as(
    rule: TextRule, text: Sequence[torch.Tensor] | torch.Tensor, *, mask: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return each sample's text, `(length, text_dim)`, with its padding as a family's pipeline has it.

    Args:
        rule (`"masked"`, `"keep_padding"` or `"encoded_padding"`): Of the family.
        text (sequence of `(length, text_dim)`, or `torch.Tensor` of shape `(n, length, text_dim)`): The texts.
        mask (`torch.Tensor` of shape `(n, length)`, *optional*): Zero for padding; without it there is none.

    Raises:
        PackingError: If the mask is not of the text's shape.
    """
    if mask is None:
        return list(text)
    if not isinstance(text, torch.Tensor) or text.shape[:2] != mask.shape:
        raise PackingError("text_mask of shape (n, length) goes with a text tensor of shape (n, length, text_dim).")
    if rule == "encoded_padding":
        return list(text)
    if rule == "keep_padding":
        return list(text.masked_fill(~mask.bool()[..., None], 0))
    return [words[keep.bool()] for words, keep in zip(text, mask, strict=True)]


def distinct(texts: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """Return the texts that differ as memory, and which of them each sample reads: contents are not compared."""
    stored: dict[tuple[object, ...], tuple[int, torch.Tensor]] = {}
    # without memory of its own (meta tensors, empty texts) a tensor is only itself
    keys = [(words.data_ptr() or id(words), words.shape, words.stride(), words.requires_grad) for words in texts]
    for key, words in zip(keys, texts, strict=True):
        stored.setdefault(key, (len(stored), words))
    return [words for _, words in stored.values()], tuple(stored[key][0] for key in keys)
