"""The texts of a pack: how they take part in it, their padding, and captions that several samples share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence

from ..devices import to_device
from ..errors import PackingError

TextRule: TypeAlias = Literal["masked", "keep_padding", "encoded_padding"]
"""What a pipeline does with the padding of a text.

It leaves padding out of attention, attends to it as zeros, or attends to it as the text encoder makes it.
"""

TextRows: TypeAlias = Literal["one", "per_strip", "slots", "per_sample", "sequence"]
"""How the texts of a pack enter the transformer's forward, see [`TextTokens`]."""

REFERENCE_FOLLOWS = 2
"""Value in the mask of a text for a token that a reference of its sample follows, where they stand within it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTokens:
    """How the text tokens of a model family take part in a pack.

    Attributes:
        channels (`str`): Setting of the transformer's configuration that holds the channels of a text embedding.
        padding (`"masked"`, `"keep_padding"` or `"encoded_padding"`): What the pipeline does with the padding of a
            text: leaves it out of attention, attends to it as zeros, or attends to it as the text encoder makes it.
        rows (`"one"`, `"per_strip"`, `"slots"`, `"per_sample"` or `"sequence"`): Batch rows of texts in the forward.
            Cross-attention reads them in one row, or in as many as there are strips where the model views its text by
            batch rows. Joint attention reads them in slots of their sample's strips, or hooks fill these slots after
            the model has refined a row per sample. A model that takes the whole pack as one sequence gets them in one
            row, and puts them beside the tokens itself.
        mask (`str`, *optional*): Argument of the forward for the mask of texts, for models that take one.
        needs_mask (`bool`): Whether they take it also where no text is padded.
        length (`int`, *optional*): Tokens of every text, padding included; by default each has its own number.
        shortest (`int`): Fewest tokens of a text, 1 where the model pools a text or refines it by attention.
    """

    channels: str = "caption_channels"
    padding: TextRule = "masked"
    rows: TextRows = "one"
    mask: str | None = None
    needs_mask: bool = False
    length: int | None = None
    shortest: int = 0

    @property
    def in_sequence(self) -> bool:
        """Whether text attends in one sequence with its sample's tokens, so that it counts as they do."""
        return self.rows in ("slots", "per_sample", "sequence")


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
    # one wait for the device, and none if the mask lies on the CPU
    kept = [keep.nonzero()[:, 0] for keep in mask.bool().cpu()]
    return [
        words[: len(index)]
        if len(index) == 0 or index[-1] == len(index) - 1
        else words.index_select(0, to_device(index, words.device))
        for words, index in zip(text, kept, strict=True)
    ]


def marked_places(mask: torch.Tensor) -> list[tuple[int, ...]]:
    """Return how many tokens of each text precede each of its references, by a mask that has [`REFERENCE_FOLLOWS`].

    Example:
        >>> marked_places(torch.tensor([[1, 2, 1, 2, 0], [1, 1, 0, 0, 0]]))
        [(2, 4), ()]
    """
    rows = [row[row != 0] for row in mask.cpu()]
    return [tuple((1 + (row == REFERENCE_FOLLOWS).nonzero()[:, 0]).tolist()) for row in rows]


def pad_texts(texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts as a row per sample, `(n, length, dim)`, and their mask, `(n, length)`, zero for padding."""
    masks = [words.new_ones(len(words)) for words in texts]
    return pad_sequence(list(texts), batch_first=True), pad_sequence(masks, batch_first=True)


def deduplicate(texts: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """Deduplicate texts by storage, not by value; return them and the index of each sample's text among them."""
    stored: dict[tuple[object, ...], tuple[int, torch.Tensor]] = {}
    # A tensor without memory of its own (a meta tensor, an empty text) equals only itself.
    keys = [(words.data_ptr() or id(words), words.shape, words.stride(), words.requires_grad) for words in texts]
    for key, words in zip(keys, texts, strict=True):
        stored.setdefault(key, (len(stored), words))
    return [words for _, words in stored.values()], tuple(stored[key][0] for key in keys)
