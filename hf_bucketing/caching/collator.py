"""A collator that reads latents and texts from a cache instead of decoding and encoding."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from ..buckets.sizes import CropBox, Size
from ..columns.prepared import CacheInfo
from ..errors import BucketingError, CacheError
from ..loaders.captions import drawn_caption, texts_of
from ..loaders.collators import Row, names_of_sources, regularization, require
from ..loaders.occurrences import OCCURRENCE, occurrence_of, row_generator
from ..loaders.state import epoch_number
from ..media.remote import is_url
from ..plans.ways import stacks
from ..randomness import ROW, Purpose
from .columns import NULL_TEXT_KEY, OTHER
from .store import TensorCache, entry_key
from .views import CACHED_VIEW, views_in_turn

_REQUESTS = 16
"""Entries that a worker requests from an object store at a time."""


class CachedCollator:
    """Make a batch of cached samples: a stack of one bucket for bucketed training, or a list for packs.

    Called with rows of a data set that has a `latents_key` column, returns a `dict` with `latents` (`(B, C, f, h, w)`,
    or a list of `(C, f, h, w)`), and the lists `size`, `crop`, `flip`, `fps` and, where the rows have it, `index`;
    with a stack also `bucket_id`, and for models with conditions `conditions`, a list per name. With a caption column
    also `caption` (of several, one drawn in every epoch, as without a cache), `text_values` (`(B, length, dim)`) and,
    for models with them, `text_mask` (`(B, length)`) and `text_others`, a tensor `(B, …)` per name. Masks are NumPy
    arrays, which accelerate leaves on the CPU: texts are as long as they say, and to read them from a device would
    wait for it.

    Args:
        cache ([`CacheInfo`][hf_bucketing.columns.CacheInfo]): `cache` of the
            [`PreparedDataset`][hf_bucketing.columns.PreparedDataset] that the rows come from. Samples are stacked if
            its `batching` is `"bucket"`.
        caption_column (`str`, *optional*): Column of a text or a list of texts, of rows that also have a `text_key`;
            None if there is none.
        seed (`int`, *optional*): Seed of the choice of one of several views and captions; without one it follows
            torch's random state.
        first_view (`bool`): Whether each row has the first of several views, which is without augmentation. By default
            one is drawn in every epoch, and each further occurrence of the row has the next one. Of views of several
            sizes, each epoch has the next one, and so have all occurrences of the row in it. A row with a cell
            `hf_bucketing_cached_view` has that one, and the batch a list of them.
        null_texts (`bool`): Whether a batch holds the dropped caption of each row, where it depends on the row, as
            `null_text`: a mapping like the batch, of the entries that begin with `text_`.
        sources (`tuple` of `str`): Names of the sources of a data set that has several. The batch then has the list
            `source`, of the name of each sample's.

    Raises:
        BucketingError: If `cache` is not a [`CacheInfo`][hf_bucketing.columns.CacheInfo], or its views have several
            sizes and there is no seed.
    """

    def __init__(
        self,
        cache: CacheInfo,
        *,
        caption_column: str | None = "caption",
        seed: int | None = None,
        first_view: bool = False,
        null_texts: bool = False,
        sources: tuple[str, ...] = (),
    ) -> None:
        if not isinstance(cache, CacheInfo):
            raise BucketingError(
                f"Expected the cache of a PreparedDataset that hf_bucketing cache wrote, got {cache!r}."
            )
        if cache.random_resize is not None and seed is None and not first_view:
            raise BucketingError("Cached views of several sizes need a `seed`, by which a plan counts their tokens.")
        self.info = cache
        self.cache = TensorCache(cache.folder)
        self.stack = stacks(cache.batching)
        self.caption_column = caption_column
        self.seed = seed
        self.first_view = first_view
        self.null_texts = null_texts
        self.sources = sources
        # Shared memory, so that persistent workers see the epoch change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose views and captions are drawn."""
        self._epoch.fill_(epoch_number(epoch))

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the batch.

        Raises:
            ColumnError: If a needed column is missing.
            CacheError: If an entry is missing or corrupt; the message names the row.
            BucketingError: If samples that are stacked belong to several buckets.
        """
        require(rows[0], ["latents_key", *(["bucket_id"] if self.stack else [])])
        rows = [self._of_view(row) for row in rows]
        entries = self._read_entries(rows, [row["latents_key"] for row in rows], "latents_key")
        batch: dict[str, Any] = {
            "latents": [tensors["latents"] for tensors, _ in entries],
            "size": [Size(*about["size"]) for _, about in entries],
            "crop": [CropBox(*about["crop"]) for _, about in entries],
            "flip": [about["flip"] for _, about in entries],
            "fps": [about["fps"] for _, about in entries],
        }
        conditions = [name for name in entries[0][0] if name != "latents"]
        if conditions:
            batch["conditions"] = {name: [tensors[name] for tensors, _ in entries] for name in conditions}
        if ROW in rows[0]:
            batch["index"] = [int(row[ROW]) for row in rows]
        batch |= regularization(rows)
        batch |= names_of_sources(rows, self.sources)
        if OCCURRENCE in rows[0]:
            batch[OCCURRENCE] = [occurrence_of(row) for row in rows]
        if CACHED_VIEW in rows[0]:
            batch[CACHED_VIEW] = [int(row[CACHED_VIEW]) for row in rows]
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
            captions, keys = zip(*(self._caption(row, self.caption_column) for row in rows), strict=True)
            batch.update(caption=list(captions), **_stacked(self._read_entries(rows, keys, "text_key")))
        if self.null_texts and NULL_TEXT_KEY in rows[0]:
            null_keys = [row[NULL_TEXT_KEY] for row in rows]
            batch["null_text"] = _stacked(self._read_entries(rows, null_keys, NULL_TEXT_KEY))
        return batch

    def empty_text(self) -> dict[str, Any]:
        """Return `text_values` `(1, length, dim)` of a dropped caption and, for models with them, the other texts.

        Raises:
            CacheError: If the cache has no entry for it.
        """
        if self.info.empty_text_key is None:
            raise CacheError("The cache has no entry for dropped captions; run hf_bucketing cache again.")
        return _stacked([self.cache.read(self.info.empty_text_key)])

    def text_of(self, caption: str) -> dict[str, Any]:
        """Return, as [`empty_text`] does, what stands for a caption of no row; `""` is a dropped caption.

        Raises:
            CacheError: If the cache has no entry for it.
        """
        if not caption:
            return self.empty_text()
        key = entry_key(kind="text", model=self.info.text_model, caption=caption)
        if not self.cache.holds(key):
            raise CacheError(
                f"The cache has no entry for the caption {caption!r}, and no text encoder runs beside it; run "
                f"hf_bucketing cache again with --more_captions {shlex.quote(caption)}."
            )
        return _stacked([self.cache.read(key)])

    def _of_view(self, row: Row) -> Row:
        """Return a row with the keys of one of its views."""
        count = self.info.views_per_sample
        if count == 1:
            return row
        view = 0
        if CACHED_VIEW in row:
            view = int(row[CACHED_VIEW])
            row = {**row, OCCURRENCE: occurrence_of(row) * count + view}  # so that views have other noise and captions
        elif not self.first_view and self.info.random_resize is not None:
            assert self.seed is not None, "the constructor refuses it"
            require(row, [ROW])
            view = int(views_in_turn([row[ROW]], count=count, seed=self.seed, epoch=int(self._epoch))[0])
        elif not self.first_view:
            drawn = row_generator(Purpose.CACHED_VIEW, row, seed=self.seed, epoch=int(self._epoch)).integers(count)
            view = (int(drawn) + occurrence_of(row)) % count
        columns = ["latents_key", *(["text_key", NULL_TEXT_KEY] if NULL_TEXT_KEY in row else [])]
        return {**row, **{name: row[name][view] for name in columns}}

    def _caption(self, row: Row, column: str) -> tuple[str, str]:
        """Return the caption of a row in this epoch, and the key of its entry."""
        position = drawn_caption(row, column, seed=self.seed, epoch=int(self._epoch))
        keys = [row["text_key"]] if isinstance(row["text_key"], str) else row["text_key"]
        return texts_of(row, column)[position], keys[position]

    def _read_entries(
        self, rows: Sequence[Row], keys: Sequence[str], column: str
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the entries of rows; from an object store, several are requested at a time."""
        if not is_url(self.cache.folder):
            return [self._read_entry(row, key, column) for row, key in zip(rows, keys, strict=True)]
        with ThreadPoolExecutor(_REQUESTS) as pool:
            return list(pool.map(self._read_entry, rows, keys, [column] * len(rows)))

    def _read_entry(self, row: Row, key: str, column: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return an entry; the row and the column that its key comes from are named in messages."""
        name = f"row {row[ROW]}" if ROW in row else f"a row without a column {ROW}"
        if not key:
            raise CacheError(f"{name} has no {column}: it was rejected; draw only rows whose bucket_id is 0 or more.")
        try:
            return self.cache.read(key)
        except CacheError as error:
            raise CacheError(f"Cannot load {name}: {error}") from error


def _stacked(texts: Sequence[tuple[dict[str, torch.Tensor], dict[str, Any]]]) -> dict[str, Any]:
    """Return embeddings and masks, padded to the longest as it was encoded, and what else the model takes of texts.

    Where that has an entry for each token, it is padded to the longest too.
    """
    length = max(about["length"] for _, about in texts)
    stacks: dict[str, Any] = {
        name: pad_sequence([_padded(name, entry[name], length) for entry, _ in texts], batch_first=True)
        for name in texts[0][0]
    }
    stacks |= {name: _as_array(mask) for name, mask in stacks.items() if "mask" in name}
    others = {name.removeprefix(OTHER): values for name, values in stacks.items() if name.startswith(OTHER)}
    batch: dict[str, Any] = {f"text_{name}": values for name, values in stacks.items() if not name.startswith(OTHER)}
    return {**batch, "text_others": others} if others else batch


def _as_array(mask: torch.Tensor) -> npt.NDArray[Any]:
    return (mask.float() if mask.is_floating_point() else mask).numpy()  # NumPy has no bfloat16


def _padded(name: str, tensor: torch.Tensor, length: int) -> torch.Tensor:
    if name.startswith(OTHER):
        return tensor
    padded = tensor.new_zeros(length, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded
