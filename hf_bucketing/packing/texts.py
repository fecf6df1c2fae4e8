"""The texts of a pack: their padding, and captions that several samples share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

from ..devices import to_device
from ..errors import PackingError

TextRule: TypeAlias = Literal["masked", "keep_padding", "encoded_padding"]
"""What a pipeline does with the padding of a text.

It leaves padding out of attention, attends to it as zeros, or attends to it as the text encoder makes it.
"""


def apply_text_mask(
    rule: TextRule, text: Sequence[torch.Tensor] | torch.Tensor, *, mask: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return each sample's text, `(length, text_dim)`, with padding, where `mask` is zero, as the pipeline has it.

    Raises:
        PackingError: If the mask does not have the text's shape.
    """
    if mask is None:
        return list(text)
    if not isinstance(text, torch.Tensor) or text.shape[:2] != mask.shape:
        raise PackingError("text_mask of shape (n, length) goes with a text tensor of shape (n, length, text_dim).")
    if rule == "encoded_padding":
        return list(text)
    if rule == "keep_padding":
        return list(text.masked_fill(~to_device(mask.bool(), text.device)[..., None], 0))
    kept = [
        keep.nonzero()[:, 0] for keep in mask.bool().cpu()
    ]  # one wait for the device, and none if the mask lies on the CPU
    return [
        words[: len(one)]
        if len(one) == 0 or one[-1] == len(one) - 1
        else words.index_select(0, to_device(one, words.device))
        for words, one in zip(text, kept, strict=True)
    ]


def deduplicate(texts: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """Deduplicate texts by storage, not by value; return them and the index of each sample's text among them."""
    stored: dict[tuple[object, ...], tuple[int, torch.Tensor]] = {}
    # A tensor without memory of its own (a meta tensor, an empty text) equals only itself.
    keys = [(words.data_ptr() or id(words), words.shape, words.stride(), words.requires_grad) for words in texts]
    for key, words in zip(keys, texts, strict=True):
        stored.setdefault(key, (len(stored), words))
    return [words for _, words in stored.values()], tuple(stored[key][0] for key in keys)
