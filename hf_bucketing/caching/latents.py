"""Latents of a data set, encoded once in stacks of one size, into a cache."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch

from ..buckets.open_table import OpenTable
from ..buckets.sizes import CropBox
from ..buckets.table import BucketTable
from ..errors import BucketingError, MediaError
from ..media.sample import load_sample
from ..media.source import MediaSource
from ..media.views import View, ViewRule, seeded_draws
from .store import TensorCache, entry_key

RULE_VERSION = 1
"""Raised when the same key parts would give other latents or another entry."""


@dataclass(frozen=True, slots=True)
class _Sample:
    key: str
    source: MediaSource
    view: View
    crop: CropBox


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentColumns:
    """Encode the latents of each row into a cache, and compute `latents_key`, the name of its entry.

    A batch function for [`map_columns`] and `Dataset.map(batched=True)`. Samples of one size are encoded together;
    what the cache holds already is not encoded again. A key depends on the file (its path below `root`, length and
    time of change, or its bytes), the model, and the whole geometry: size, frame rate, first frame, resized size, crop
    and flip; for a video also on the decoder, as the pixels of two may differ. So whatever changes, exactly the
    samples that it changes are encoded anew. Rows without a bucket get an empty key. An entry also holds its `size`,
    `crop`, `flip` and `fps`, for the collator.

    Args:
        encode (callable): From pixels `(B, 3, F, H, W)` in [−1, 1] to latents `(B, C, f, h, w)`.
        model (`str`): Fingerprint of all that `encode` depends on.
        cache ([`TensorCache`][hf_bucketing.caching.store.TensorCache]): Where entries lie.
        table ([`BucketTable`] or [`OpenTable`]): Of the `bucket_id` column: the size of each sample.
        column (`str`): Media column.
        root (`str`, *optional*): Folder that relative paths start from.
        views ([`ViewRule`][hf_bucketing.media.ViewRule]): Frames, crop, flip and decoder; by default nothing is
            random, and PyAV decodes.
        seed (`int`): Of random views, which are those of epoch 0 and need an `index` column.
        batch_size (`int`): Samples per call of `encode`.
        num_threads (`int`): Threads that decode, ahead of the encoder.
        on_error (`"raise"` or `"reject"`): Whether an unreadable file is an error, or gets an empty key.
        counts (`Counter`): Counts rows: `encoded`, `found` in the cache, `unreadable`, `rejected` (without a bucket).

    Raises:
        BucketingError: On a number below 1, or an unknown `on_error`.
    """

    encode: Callable[[torch.Tensor], torch.Tensor]
    model: str
    cache: TensorCache
    table: BucketTable | OpenTable
    column: str
    root: str | None = None
    views: ViewRule = field(default_factory=lambda: ViewRule(random_crop=False))
    seed: int = 0
    batch_size: int = 8
    num_threads: int = 2
    on_error: Literal["raise", "reject"] = "raise"
    counts: Counter[str] = field(default_factory=Counter, compare=False)

    optional_columns = ()
    output_columns = ("latents_key",)
    vectorised = False
    reusable = False

    def __post_init__(self) -> None:
        if min(self.batch_size, self.num_threads) < 1:
            raise BucketingError(f"`batch_size` and `num_threads` must be at least 1, got {self}.")
        if self.on_error not in ("raise", "reject"):
            raise BucketingError(f'on_error must be "raise" or "reject", got {self.on_error!r}.')

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must hold."""
        index = ("index",) if self.views.num_draws else ()
        return (self.column, "width", "height", "num_frames", "fps", "bucket_id", *index)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
        """Return the key of each row's entry; all entries are there.

        Raises:
            MediaError: Under `on_error="raise"`, for the first unreadable file; the message names it.
        """
        rows = [
            dict(zip(self.input_columns, cells, strict=True))
            for cells in zip(*(batch[name] for name in self.input_columns), strict=True)
        ]
        samples = [self._sample(row, position) for position, row in enumerate(rows)]
        missing = {sample.key: sample for sample in samples if sample and not self.cache.holds(sample.key)}
        unreadable = self._encode(list(missing.values()))
        keys = [sample.key if sample and sample.key not in unreadable else "" for sample in samples]
        for row, key in zip(rows, keys, strict=True):
            outcome = "rejected" if row["bucket_id"] < 0 else "unreadable" if not key else "found"
            self.counts["encoded" if missing.pop(key, None) else outcome] += 1
        return {"latents_key": keys}

    def _sample(self, row: Mapping[str, Any], position: int) -> _Sample | None:
        """Return a row's sample; None if it has no bucket or file."""
        if row["bucket_id"] < 0:
            return None
        try:
            source = MediaSource.from_cell(row[self.column], root=self.root, name=f"row {position} of its batch")
            view = self.views.view(
                self.table.size(int(row["bucket_id"])),
                num_frames=int(row["num_frames"]),
                fps=float(row["fps"]),
                draws=self._draws(row),
                name=source.path,
            )
        except MediaError:
            if self.on_error == "raise":
                raise
            return None
        resized, crop = view.crop(int(row["height"]), int(row["width"]))
        geometry = {"size": view.size, "fps": view.fps, "start": view.start, "flip": view.flip}
        # Images have one decoder, and PyAV's keys are those of caches from before there was another.
        if view.fps and view.video_decoder != "pyav":
            geometry["decoder"] = view.video_decoder
        key = entry_key(
            kind="latents",
            rule_version=RULE_VERSION,
            file=_identity(source, self.root),
            model=self.model,
            **geometry,
            resized=resized,
            crop=crop,
        )
        return _Sample(key, source, view, crop)

    def _draws(self, row: Mapping[str, Any]) -> np.ndarray:
        count = self.views.num_draws
        return seeded_draws(count, seed=self.seed, epoch=0, index=int(row["index"])) if count else np.zeros(0)

    def _encode(self, samples: list[_Sample]) -> set[str]:
        """Write the entries of samples; return the keys of unreadable ones."""
        unreadable = set()
        for stack in self._loaded(samples):
            readable, pixels = [], []
            for sample, future in stack:
                try:
                    pixels.append(future.result())
                    readable.append(sample)
                except MediaError:
                    if self.on_error == "raise":
                        raise
                    unreadable.add(sample.key)
            if not pixels:
                continue
            for sample, latents in zip(readable, self.encode(torch.stack(pixels)), strict=True):
                view = sample.view
                about = {"size": view.size, "crop": sample.crop, "flip": view.flip, "fps": view.fps}
                self.cache.write(sample.key, {"latents": latents}, about=about)
        return unreadable

    def _loaded(self, samples: list[_Sample]) -> Iterator[list[tuple[_Sample, Future[torch.Tensor]]]]:
        """Yield stacks of samples of one size with their pixels, the next one being decoded meanwhile."""
        ordered = sorted(samples, key=lambda sample: sample.view.size)
        stacks = [
            group[start : start + self.batch_size]
            for _, members in groupby(ordered, key=lambda sample: sample.view.size)
            for group in [list(members)]
            for start in range(0, len(group), self.batch_size)
        ]
        waiting: deque[list[tuple[_Sample, Future[torch.Tensor]]]] = deque()
        with ThreadPoolExecutor(self.num_threads) as pool:
            for stack in stacks:
                waiting.append([(sample, pool.submit(_pixels, sample)) for sample in stack])
                if len(waiting) > 1:
                    yield waiting.popleft()
            yield from waiting


def _pixels(sample: _Sample) -> torch.Tensor:
    pixels, crop = load_sample(sample.source, sample.view)
    if crop != sample.crop:
        raise MediaError(
            f"{sample.source.path} has another size than its width and height columns say, which puts the crop at "
            f"{crop} instead of {sample.crop}; compute the columns again."
        )
    return pixels


def _identity(source: MediaSource, root: str | None) -> list[Any]:
    """Return what changes when a file does, and stays when the folder of all files is moved."""
    if source.data is not None:
        return [hashlib.sha256(source.data).hexdigest()]
    status = os.stat(source.path)
    path = source.path if root is None else os.path.relpath(source.path, root)
    return [path, status.st_size, status.st_mtime_ns]
