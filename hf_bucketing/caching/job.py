"""Encode a prepared data set once, on any number of processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm

from ..buckets.assignment import Rejection
from ..columns.apply import map_columns
from ..columns.arrays import column_array
from ..columns.buckets import BucketColumns
from ..columns.prepared import CacheInfo, PreparedDataset
from ..errors import BucketingError
from ..media.views import ViewRule
from ..models.recipe import Recipe
from .fingerprints import latents_fingerprint, text_fingerprint
from .latents import LatentColumns
from .store import TensorCache
from .texts import TextColumns

_STACKS_PER_CALL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheJob:
    """Caching of latents and texts: what encodes, where to, and which views of the files.

    Args:
        recipe ([`Recipe`]): Loaded, on its device and in its dtype.
        folder (`str`): Of the cache. One that holds entries is completed.
        batching (`"bucket"` or `"pack"`): Whether each sample gets its size in `prepared.table`, or in
            `prepared.open_table`.
        views ([`ViewRule`][hf_bucketing.media.ViewRule]): Frames, crop, flip and decoder; by default nothing is
            random, and PyAV decodes.
        seed (`int`): Of random views, which are those of epoch 0.
        batch_size (`int`): Samples, or captions, that are encoded together.
        num_threads (`int`): Threads that decode.
        on_error (`"raise"` or `"reject"`): Whether an unreadable file is an error, or its row is rejected.

    Raises:
        BucketingError: If `batching` is unknown.
    """

    recipe: Recipe
    folder: str
    batching: Literal["bucket", "pack"] = "bucket"
    views: ViewRule = field(default_factory=lambda: ViewRule(random_crop=False))
    seed: int = 0
    batch_size: int = 8
    num_threads: int = 2
    on_error: Literal["raise", "reject"] = "raise"

    def __post_init__(self) -> None:
        if self.batching not in ("bucket", "pack"):
            raise BucketingError(f'batching must be "bucket" or "pack", got {self.batching!r}.')

    def run(self, prepared: PreparedDataset) -> tuple[PreparedDataset | None, Counter[str]]:
        """Encode what the cache lacks; each of accelerate's processes takes its share of the rows.

        Args:
            prepared ([`PreparedDataset`]): Prepared for the recipe's model.

        Returns:
            `tuple`: The data set with `latents_key` and `text_key` columns and its `cache`, on the main process (None
            on others), and how many rows and captions of all processes were encoded, found, unreadable or rejected.

        Raises:
            MediaError: Under `on_error="raise"`, for an unreadable file.
        """
        state = PartialState()
        cache = TensorCache(Path(self.folder))
        if state.is_main_process:
            cache.sweep()
        state.wait_for_everyone()
        rows, latents = self._latents(prepared, cache)
        self._encode(rows, latents, state)
        text = self._text(prepared, cache)
        if text is not None:
            captions = sorted({*prepared.dataset[text.column], ""})
            share = captions[state.process_index :: state.num_processes]
            for start in tqdm(range(0, len(share), text.batch_size), desc="texts", disable=not state.is_main_process):
                text({text.column: share[start : start + text.batch_size]})
        mine = {**latents.counts, **{f"captions {name}": n for name, n in (text.counts if text else {}).items()}}
        state.wait_for_everyone()
        counts: Counter[str] = sum((Counter(part) for part in gather_object([mine])), Counter())
        if not state.is_main_process:
            return None, counts
        keys = map_columns(rows, replace(latents, counts=Counter()), overwrite=True)["latents_key"]
        dataset = _with_keys(prepared.dataset, np.array(keys), column_array(rows, "bucket_id"))
        if text is not None:
            dataset = map_columns(dataset, text, overwrite=True)
        info = CacheInfo(
            folder=self.folder,
            batching=self.batching,
            latents_model=latents.model,
            text_model=None if text is None else text.model,
            empty_text_key=None if text is None else text.key(""),
            views={**asdict(self.views), "seed": self.seed},
        )
        return replace(prepared, dataset=dataset, cache=info), counts

    def _latents(self, prepared: PreparedDataset, cache: TensorCache) -> tuple[Dataset, LatentColumns]:
        """Return the rows with the buckets that they are cached at, and the column callable."""
        table = prepared.table if self.batching == "bucket" else prepared.open_table
        rows = prepared.dataset
        if self.batching == "pack":
            rows = map_columns(rows, BucketColumns(table, prepared.spec), overwrite=True)
        device = self.recipe.pipeline.vae.device
        columns = LatentColumns(
            encode=lambda pixels: self.recipe.encode_latents(pixels.to(device)),
            model=latents_fingerprint(self.recipe),
            cache=cache,
            table=table,
            column=prepared.column,
            root=prepared.root,
            views=self.views,
            seed=self.seed,
            batch_size=self.batch_size,
            num_threads=self.num_threads,
            on_error=self.on_error,
        )
        return rows, columns

    def _text(self, prepared: PreparedDataset, cache: TensorCache) -> TextColumns | None:
        if prepared.caption_column is None:
            return None
        return TextColumns(
            encode=self.recipe.encode_text,
            model=text_fingerprint(self.recipe),
            cache=cache,
            column=prepared.caption_column,
            batch_size=self.batch_size,
        )

    def _encode(self, rows: Dataset, latents: LatentColumns, state: PartialState) -> None:
        """Encode this process's share of the rows, in the order of their buckets, so that stacks are full."""
        order = np.argsort(column_array(rows, "bucket_id"), kind="stable")
        share = np.array_split(order, state.num_processes)[state.process_index]
        step = self.batch_size * _STACKS_PER_CALL
        chosen = rows.select_columns(list(latents.input_columns)).select(share)
        with tqdm(total=len(share), desc="latents", disable=not state.is_main_process) as bar, torch.no_grad():
            for batch in chosen.iter(batch_size=step):
                bar.update(len(latents(batch)["latents_key"]))


def _with_keys(dataset: Dataset, keys: np.ndarray, bucket_ids: np.ndarray) -> Dataset:
    """Add the keys; rows that turned out to be unreadable get the columns that unreadable rows have."""
    unreadable = (keys == "") & (bucket_ids >= 0)
    columns = {"latents_key": keys}
    if unreadable.any():
        marks = {"width": -1, "height": -1, "num_frames": -1, "bucket_id": -1, "num_tokens": 0}
        for name, mark in {**marks, "rejection": Rejection.UNREADABLE.label}.items():
            old = column_array(dataset, name)
            columns[name] = np.where(unreadable, np.array(mark, old.dtype if old.dtype.kind == "i" else None), old)
    dataset = dataset.remove_columns([name for name in columns if name in dataset.column_names])
    for name, column in columns.items():
        dataset = dataset.add_column(name, column.tolist() if column.dtype.kind == "U" else column)
    return dataset
