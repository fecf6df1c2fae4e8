"""A collator that reads latents and texts from a cache instead of decoding and encoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..buckets.sizes import CropBox, Size
from ..columns.prepared import CacheInfo
from ..errors import BucketingError, CacheError
from ..loaders.collators import Row, require
from .store import TensorCache


class CachedCollator:
    """Make a batch of cached samples: a stack of one bucket for bucketed training, or a list for packs.

    Called with rows of a data set that has a `latents_key` column, returns a `dict` with `latents` (`(B, C, f, h, w)`,
    or a list of `(C, f, h, w)`), and the lists `size`, `crop`, `flip`, `fps` and, where the rows have it, `index`;
    with a stack also `bucket_id`. With a caption column also `caption`, `text_values` (`(B, length, dim)`) and, for
    models with one, `text_mask` (`(B, length)`).

    Args:
        cache ([`CacheInfo`][hf_bucketing.columns.CacheInfo]): `cache` of the
            [`PreparedDataset`][hf_bucketing.columns.PreparedDataset] that the rows come from. Samples are stacked if
            its `batching` is `"bucket"`.
        caption_column (`str`, *optional*): Text column of rows that also have a `text_key`; None if there is none.

    Raises:
        BucketingError: If `cache` is not a [`CacheInfo`][hf_bucketing.columns.CacheInfo].
    """

    def __init__(self, cache: CacheInfo, *, caption_column: str | None = "caption") -> None:
        if not isinstance(cache, CacheInfo):
            raise BucketingError(
                f"Expected the cache of a PreparedDataset that scripts/cache_latents.py wrote, got {cache!r}."
            )
        self.info = cache
        self.cache = TensorCache(Path(cache.folder))
        self.stack = cache.batching == "bucket"
        self.caption_column = caption_column

    def set_epoch(self, epoch: int) -> None:
        """Accept the epoch as other collators do; cached samples are the same in every epoch."""

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the batch.

        Raises:
            ColumnError: If a needed column is missing.
            CacheError: If an entry is missing or corrupt; the message names the row.
            BucketingError: If samples that are stacked belong to several buckets.
        """
        require(rows[0], ["latents_key", *(["bucket_id"] if self.stack else [])])
        entries = [self._read(row, "latents_key") for row in rows]
        batch: dict[str, Any] = {
            "latents": [tensors["latents"] for tensors, _ in entries],
            "size": [Size(*about["size"]) for _, about in entries],
            "crop": [CropBox(*about["crop"]) for _, about in entries],
            "flip": [about["flip"] for _, about in entries],
            "fps": [about["fps"] for _, about in entries],
        }
        if "index" in rows[0]:
            batch["index"] = [int(row["index"]) for row in rows]
        if self.stack:
            ids = {int(row["bucket_id"]) for row in rows}
            if len(ids) > 1:
                raise BucketingError(
                    f"A batch holds the buckets {sorted(ids)}, whose latents cannot be stacked; draw it with a "
                    'BucketBatchSampler, whose `remainder` is not "catch_all": cached samples have one size.'
                )
            batch.update(latents=torch.stack(batch["latents"]), bucket_id=ids.pop())
        if self.caption_column is not None:
            require(rows[0], [self.caption_column, "text_key"])
            batch["caption"] = [row[self.caption_column] for row in rows]
            texts = [_padded(*self._read(row, "text_key")) for row in rows]
            batch.update({name: torch.stack([text[name] for text in texts]) for name in texts[0]})
        return batch

    def empty_text(self) -> dict[str, torch.Tensor]:
        """Return `text_values` `(length, dim)` and, for models with one, `text_mask` `(length,)` of the empty caption.

        Raises:
            CacheError: If the cache has no entry for it.
        """
        if self.info.empty_text_key is None:
            raise CacheError("The cache has no entry for the empty caption; run scripts/cache_latents.py again.")
        return _padded(*self.cache.read(self.info.empty_text_key))

    def _read(self, row: Row, column: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        name = f"row {row['index']}" if "index" in row else "a row without an index column"
        if not row[column]:
            raise CacheError(f"{name} has no {column}: it was rejected; draw only rows whose bucket_id is 0 or more.")
        try:
            return self.cache.read(row[column])
        except CacheError as error:
            raise CacheError(f"Cannot load {name}: {error}") from error


def _padded(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return embeddings and mask with the padding that the cache cut off."""
    padded = {}
    for name, tensor in tensors.items():
        whole = tensor.new_zeros(about["length"], *tensor.shape[1:])
        whole[: len(tensor)] = tensor
        padded[f"text_{name}"] = whole
    return padded
