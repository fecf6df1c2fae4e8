"""Captions as a transformer takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..devices import to_device

AUDIO_TEXT = "audio_text"
"""Name among the `others` of captions of the embeddings that audio attends to, where they are not those of video."""


class TextEmbeddings(NamedTuple):
    """Captions as the transformer takes them.

    Attributes:
        values (`torch.Tensor` of shape `(n, length, text_dim)`): Padded embeddings.
        mask (`torch.Tensor` of shape `(n, length)`, *optional*): Nonzero for real tokens; None where the model also
            attends to padding. It may lie on the CPU, like the masks of `others`.
        others (mapping of `str` to `torch.Tensor` of shape `(n, …)`): What else the transformer takes of a caption,
            such as pooled embeddings, under the names of its forward's arguments.
    """

    values: torch.Tensor
    mask: torch.Tensor | None = None
    others: Mapping[str, torch.Tensor] = MappingProxyType({})

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any]) -> TextEmbeddings:
        """Return those of a batch of [`CachedCollator`][hf_bucketing.caching.CachedCollator]."""
        mask = batch.get("text_mask")
        others = {name: torch.as_tensor(values) for name, values in batch.get("text_others", {}).items()}
        return cls(batch["text_values"], None if mask is None else torch.as_tensor(mask), others)

    def to(self, dtype: torch.dtype) -> TextEmbeddings:
        """Cast the embeddings to another dtype."""
        others = {
            name: values.to(dtype) if values.is_floating_point() else values for name, values in self.others.items()
        }
        return TextEmbeddings(self.values.to(dtype), self.mask, others)

    def trimmed(self) -> TextEmbeddings:
        """Return these embeddings without the padding at the end that all captions share."""
        if self.mask is None:
            return self
        length = int(self.mask.bool().any(0).nonzero().max()) + 1
        return TextEmbeddings(self.values[:, :length], self.mask[:, :length], self.others)

    def padded(self, length: int) -> TextEmbeddings:
        """Return these embeddings padded to `(n, length, text_dim)`, with a mask that leaves the padding out."""
        mask = torch.ones_like(self.values[..., 0], dtype=torch.long) if self.mask is None else self.mask
        missing = length - self.values.shape[1]
        return TextEmbeddings(F.pad(self.values, (0, 0, 0, missing)), F.pad(mask, (0, missing)), self.others)

    def replaced(self, rows: Sequence[bool], empty: TextEmbeddings) -> TextEmbeddings:
        """Return these embeddings with those of the null text, `(1, …)` or one per row, in some rows.

        Without a mask of its own, the null text takes the one of each row. Texts of other lengths are padded.
        """
        lengths = {self.values.shape[1], empty.values.shape[1]}
        if len(lengths) > 1:
            return self.padded(max(lengths)).replaced(rows, empty.padded(max(lengths)))

        def replace(values: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            chosen = to_device(torch.tensor(rows), values.device).view(-1, *[1] * (values.ndim - 1))
            return torch.where(chosen, to_device(by, values.device, dtype=values.dtype), values)

        mask = self.mask if self.mask is None or empty.mask is None else replace(self.mask, empty.mask)
        others = {name: replace(values, empty.others[name]) for name, values in self.others.items()}
        return TextEmbeddings(replace(self.values, empty.values), mask, others)

    def pack_kwargs(self) -> dict[str, Any]:
        """Return these embeddings as arguments of [`Packing.pack`][hf_bucketing.packing.Packing]."""
        return {"text": self.values, "text_mask": self.mask}


def cleans_captions() -> bool:
    """Return whether pipelines that can clean captions do so, which takes two libraries."""
    from diffusers.utils import is_bs4_available, is_ftfy_available

    return bool(is_bs4_available() and is_ftfy_available())
