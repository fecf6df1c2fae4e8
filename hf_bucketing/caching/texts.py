"""Encode each distinct caption of a data set once, into a cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ColumnError
from .config import CacheConfig
from .store import entry_key

RULE_VERSION = 1
"""Raised when an entry changes although all parts of its key are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextColumns:
    """Encode captions into a cache and compute `text_key`, the key of each row's entry.

    A batch function for [`map_columns`][hf_bucketing.columns.map_columns] and `Dataset.map(batched=True)`. Identical
    captions share an entry, and entries that exist are not encoded again. Trailing padding is not stored: tokens that
    the mask excludes or, without a mask, that are zero. An entry keeps the padded `length`, and the collator restores
    what the encoder returned.

    Args:
        encode (callable): Encodes captions to embeddings `(n, length, dim)` and a mask `(n, length)` or None.
        model (`str`): Fingerprint of all that `encode` depends on.
        column (`str`): Text column.
        config ([`CacheConfig`]): Folder of the entries, and captions per call of `encode`.
        counts (`Counter`): Numbers of distinct captions per batch that were `encoded`, or `found` in the cache.
    """

    encode: Callable[[list[str]], tuple[torch.Tensor, torch.Tensor | None]]
    model: str
    column: str
    config: CacheConfig
    counts: Counter[str] = field(default_factory=Counter, compare=False)

    optional_columns = ()
    output_columns = ("text_key",)
    vectorised = False
    reusable = False

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must hold."""
        return (self.column,)

    def key(self, caption: str) -> str:
        """Return the key of a caption's entry."""
        return entry_key(kind="text", rule_version=RULE_VERSION, model=self.model, caption=caption)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
        """Write missing entries and return the key of each caption's entry.

        Raises:
            ColumnError: If a caption is not text.
        """
        captions = list(batch[self.column])
        wrong = next((caption for caption in captions if not isinstance(caption, str)), "")
        if not isinstance(wrong, str):
            raise ColumnError(f"The column {self.column} must hold text, got {wrong!r}; use '' for no caption.")
        keys = {caption: self.key(caption) for caption in captions}
        missing = [caption for caption, key in keys.items() if not self.config.cache.holds(key)]
        for start in range(0, len(missing), self.config.batch_size):
            self._encode({caption: keys[caption] for caption in missing[start : start + self.config.batch_size]})
        self.counts.update(encoded=len(missing), found=len(keys) - len(missing))
        return {"text_key": [keys[caption] for caption in captions]}

    def _encode(self, keys: Mapping[str, str]) -> None:
        values, mask = self.encode(list(keys))
        real = values.ne(0).any(-1) if mask is None else mask.ne(0)
        for row, key in enumerate(keys.values()):
            end = max(int(real[row].nonzero().max()) + 1 if real[row].any() else 0, 1)
            entry = {"values": values[row, :end]}
            if mask is not None:
                entry["mask"] = mask[row, :end]
            self.config.cache.write(key, entry, about={"length": values.shape[1]})
