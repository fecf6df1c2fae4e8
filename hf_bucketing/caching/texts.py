"""Captions of a data set, each different one encoded once, into a cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import BucketingError, ColumnError
from .store import TensorCache, entry_key

RULE_VERSION = 1
"""Raised when the same key parts would give another entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextColumns:
    """Encode captions into a cache, and compute `text_key`, the name of each row's entry.

    A batch function for [`map_columns`] and `Dataset.map(batched=True)`. Identical captions share an entry; what the
    cache holds already is not encoded again. Trailing padding is cut off where the mask says so, or where it is zero,
    and an entry holds the padded `length`, so that the collator gives back what the encoder gave.

    Args:
        encode (callable): From captions to embeddings `(n, length, dim)` and a mask `(n, length)`, or None.
        model (`str`): Fingerprint of all that `encode` depends on.
        cache ([`TensorCache`][hf_bucketing.caching.store.TensorCache]): Where entries lie.
        column (`str`): Text column.
        batch_size (`int`): Captions per call of `encode`.
        counts (`Counter`): Counts different captions of each batch: `encoded`, or `found` in the cache.

    Raises:
        BucketingError: If `batch_size` is below 1.
    """

    encode: Callable[[list[str]], tuple[torch.Tensor, torch.Tensor | None]]
    model: str
    cache: TensorCache
    column: str
    batch_size: int = 8
    counts: Counter[str] = field(default_factory=Counter, compare=False)

    optional_columns = ()
    output_columns = ("text_key",)
    vectorised = False
    reusable = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise BucketingError(f"`batch_size` must be at least 1, got {self.batch_size}.")

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must hold."""
        return (self.column,)

    def key(self, caption: str) -> str:
        """Return the key of a caption's entry."""
        return entry_key(kind="text", rule_version=RULE_VERSION, model=self.model, caption=caption)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
        """Return the key of each caption's entry; all entries are there.

        Raises:
            ColumnError: If a caption is no text.
        """
        captions = list(batch[self.column])
        wrong = next((caption for caption in captions if not isinstance(caption, str)), "")
        if not isinstance(wrong, str):
            raise ColumnError(f"The column {self.column} must hold text, got {wrong!r}; fill it, with '' at least.")
        keys = {caption: self.key(caption) for caption in captions}
        missing = [caption for caption, key in keys.items() if not self.cache.holds(key)]
        for start in range(0, len(missing), self.batch_size):
            self._encode({caption: keys[caption] for caption in missing[start : start + self.batch_size]})
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
            self.cache.write(key, entry, about={"length": values.shape[1]})
