"""Encode latents, in stacks of one size, and each distinct caption once, into a cache."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch

from ..buckets.open_table import OpenTable
from ..buckets.sizes import CropBox, Size
from ..buckets.table import BucketTable
from ..conditions.names import REFERENCE
from ..errors import CacheError, MediaError
from ..loaders.captions import texts_of
from ..loaders.random_resize import RandomResize
from ..media.probe import decoding_rules, read_header
from ..media.remote import is_url
from ..media.rows import CLIP_START, FileSample, MediaColumns, check_flips
from ..media.sample import LoadedSample, load
from ..media.source import MediaSource
from ..media.views import seeded_draws
from ..randomness import ROW
from .settings import CacheConfig, CachedView
from .store import TensorCache, entry_key, not_finite

Media = Mapping[str, Sequence[Any]]

_Encoded: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, Mapping[str, torch.Tensor]]
"""Embeddings of texts, their mask and what else the model takes of them."""

NULL_TEXT_KEY = "null_text_key"
"""Column of the key of the empty caption beside a row's references, where the text encoder sees these."""

OTHER = "other."
"""Prefix in an entry of what the model takes of a caption beside its embeddings; it has no padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedColumns:
    """What column callables that encode into a cache share: see [`LatentColumns`] and [`TextColumns`]."""

    model: str
    config: CacheConfig
    counts: Counter[str] = field(default_factory=Counter, compare=False)

    vectorised = False
    reusable = False

    @property
    def cache(self) -> TensorCache:
        """The entries in the folder of the settings."""
        return TensorCache(self.config.folder)


@dataclass(frozen=True, slots=True)
class _Sample:
    key: str
    file: FileSample
    crop: CropBox


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentColumns(_CachedColumns):
    """Encode the latents of each row into a cache and compute `latents_key`, the key of its entry, or of each view.

    A batch function for [`map_columns`][hf_bucketing.columns.map_columns] and `Dataset.map(batched=True)`. Samples of
    one size are encoded together, and entries that exist are not encoded again. A key depends on the file (its path
    below `root`, length and modification time, or its bytes), the model, and the whole geometry: size, frame rate,
    first frame, resized size, crop and flip; for a video also on the decoder, as the pixels of two decoders may
    differ, on the rules by which it is decoded (`decoding_rules` in `media/probe.py`), on the files of its conditions
    and the rule of its audio, and where one of these files can hold transparent parts, as their headers say, on the
    background. For a URL it is the URL, the length, and the ETag or other version that its server tells. Where a time
    has no fraction, as archives set it, parts of the file are read too. So after any change, exactly the samples that
    it affects are encoded again. Rows without a bucket get empty keys. An entry also holds its `size`, `crop`, `flip`
    and `fps`, for the collator.

    Args:
        encode (callable): Encodes pixels `(B, 3, F, H, W)` in [−1, 1] and the data set's conditions of each sample,
            lists by name, to `latents`, `(B, C, f, h, w)`, and to what the model takes of the conditions, `(B, …)`
            each, or a list with one tensor per sample, or with a tuple of tensors for its references.
        model (`str`): Fingerprint of all that `encode` depends on.
        table ([`BucketTable`] or [`OpenTable`]): Sizes that the `bucket_id` column refers to.
        files ([`MediaColumns`][hf_bucketing.media.MediaColumns]): Columns that lead to the files.
        config ([`CacheConfig`]): Folder of the entries, views, and settings of decoding and encoding.
        counts (`Counter`): Numbers of rows that were `encoded`, `found` in the cache, `unreadable`, `not finite`
            (encoded to NaN or infinite numbers, which no entry holds), or `rejected` (without a bucket).
    """

    encode: Callable[[torch.Tensor, Media], Mapping[str, torch.Tensor | Sequence[Any]]]
    table: BucketTable | OpenTable
    files: MediaColumns

    optional_columns = (CLIP_START,)
    output_columns = ("latents_key",)

    def __post_init__(self) -> None:
        check_flips(self.config.views, self.files.conditions, self.files.references)

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must hold."""
        index = (ROW,) if self.config.views.num_draws or self.config.random_resize else ()
        sizes = ("width", "height", "num_frames", "fps", "bucket_id")
        return (self.files.column, *self.files.shown_columns, *sizes, *index)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Write missing entries and return the key of each row's entry, or the list of those of its views.

        Raises:
            MediaError: Under `on_error="raise"`, for the first file that is unreadable, or that the model encodes to
                numbers that are not finite; the message names it.
        """
        rows, samples = self._samples(batch)
        missing = {
            sample.key: sample for views in samples for sample in views if sample and not self.cache.holds(sample.key)
        }
        unreadable, broken = self._encode(list(missing.values()))
        cells = []
        for row, views in zip(rows, samples, strict=True):
            keys = [sample.key for sample in views if sample and sample.key not in unreadable | broken]
            complete = len(keys) == len(views)
            encoded = [missing.pop(key, None) is not None for key in keys]
            fault = "not finite" if any(sample and sample.key in broken for sample in views) else "unreadable"
            outcome = "rejected" if row["bucket_id"] < 0 else "found" if complete else fault
            self.counts["encoded" if complete and any(encoded) else outcome] += 1
            cells.append(_cell(keys if complete else [""] * len(views)))
        return {"latents_key": cells}

    def _samples(self, batch: Mapping[str, Sequence[Any]]) -> tuple[list[dict[str, Any]], list[list[_Sample | None]]]:
        """Return the rows of a batch and the samples of their views."""
        names = [*self.input_columns, *(name for name in self.optional_columns if name in batch)]
        rows = [dict(zip(names, cells, strict=True)) for cells in zip(*(batch[name] for name in names), strict=True)]
        rules = self.config.view_rules
        return rows, [[self._sample(row, position, view) for view in rules] for position, row in enumerate(rows)]

    def _size(self, row: Mapping[str, Any], cached: CachedView) -> Size:
        """Return the size of a view of a row that has a bucket."""
        if cached.random_resize is None:
            return self.table.size(int(row["bucket_id"]))
        assert isinstance(self.table, OpenTable), "CacheConfig refuses it for buckets"
        resize = RandomResize(spec=self.table.spec, min_side=cached.random_resize, seed=self.config.seed)
        stored_size = Size(*(int(row[name]) for name in ("num_frames", "height", "width")))
        stored_size = stored_size._replace(frames=int(self.table.cut(stored_size.frames)))
        return resize.sizes([stored_size], indices=[int(row[ROW])], epoch=cached.epoch)[0]

    def _sample(self, row: Mapping[str, Any], position: int, cached: CachedView) -> _Sample | None:
        """Return a view of a row; None if it has no bucket or no file."""
        if row["bucket_id"] < 0:
            return None
        draws, rule = np.zeros(0), cached.rule
        if rule.num_draws:
            draws = seeded_draws(rule.num_draws, seed=self.config.seed, epoch=cached.epoch, index=int(row[ROW]))
        try:
            sample = self.files.sample(
                row,
                self._size(row, cached),
                views=rule,
                draws=draws,
                name=f"row {position} of its batch",
            )
            file = _identity(sample.source, self.files.root)
            conditions = {
                name: _identities(source, self.files.root) for name, source in sorted(sample.conditions.items())
            }
            background = {"background": sample.view.background} if _may_be_transparent(sample) else {}
        except MediaError:
            if self.config.on_error == "raise":
                raise
            return None
        view = sample.view
        resized, crop = view.crop(int(row["height"]), int(row["width"]))
        geometry: dict[str, Any] = {"size": view.size, "fps": view.fps, "start": view.start, "flip": view.flip}
        geometry |= background
        if view.offset:
            geometry["offset"] = view.offset
        # Images have one decoder. Keys for PyAV do not name it: older caches had no other decoder.
        if view.fps and view.video_decoder != "pyav":
            geometry["decoder"] = view.video_decoder
        if conditions:
            geometry |= {"conditions": conditions, "reference_multiples": sample.references.multiples}
        if sample.audio is not None:
            geometry["audio"] = {**sample.audio.settings, "present": sample.has_audio}
        if self.config.appended_frames is not None:
            geometry["appended"] = self.config.appended_frames
        if REFERENCE in conditions:
            settings = ("max_pixels", "downscale_factor", "multiples")
            geometry["references"] = {name: getattr(sample.references, name) for name in settings}
            # Keys of rules that older caches had do not name what was added.
            geometry["references"] |= sample.references.added
            if view.flip_references:
                geometry["flip_references"] = True
        key = entry_key(
            kind="latents",
            file=file,
            model=self.model,
            **geometry,
            resized=resized,
            crop=crop,
        )
        return _Sample(key, sample, crop)

    def _encode(self, samples: list[_Sample]) -> tuple[set[str], set[str]]:
        """Write the entries of samples; return the keys of unreadable ones, and of those that are not finite."""
        unreadable, broken = set(), set()
        for stack in self._loaded(samples):
            readable, loaded = [], []
            for sample, future in stack:
                try:
                    loaded.append(future.result())
                    readable.append(sample)
                except MediaError:
                    if self.config.on_error == "raise":
                        raise
                    unreadable.add(sample.key)
            if not loaded:
                continue
            conditions = {name: [sample.conditions[name] for sample in loaded] for name in self.files.shown}
            encoded = self.encode(torch.stack([sample.pixels for sample in loaded]), conditions)
            for row, sample in enumerate(readable):
                view = sample.file.view
                about = {"size": view.size, "crop": sample.crop, "flip": view.flip, "fps": view.fps}
                entry = {name: values[row] for name, values in encoded.items()}
                entry = {name: _on_cpu(values) for name, values in entry.items()}
                if names := not_finite(entry):
                    if self.config.on_error == "raise":
                        raise MediaError(_not_finite(sample.file, names))
                    broken.add(sample.key)
                    continue
                self.cache.write(sample.key, entry, about=about)
        return unreadable, broken

    def _loaded(self, samples: list[_Sample]) -> Iterator[list[tuple[_Sample, Future[LoadedSample]]]]:
        """Yield stacks of samples of one size with what is loaded of them, while the next stack is decoded."""
        ordered = sorted(samples, key=lambda sample: sample.file.view.size)
        stacks = [
            group[start : start + self.config.batch_size]
            for _, members in groupby(ordered, key=lambda sample: sample.file.view.size)
            for group in [list(members)]
            for start in range(0, len(group), self.config.batch_size)
        ]
        waiting: deque[list[tuple[_Sample, Future[LoadedSample]]]] = deque()
        with ThreadPoolExecutor(self.config.num_threads) as pool:
            for stack in stacks:
                waiting.append([(sample, pool.submit(load, sample.file)) for sample in stack])
                if len(waiting) > 1:
                    yield waiting.popleft()
            yield from waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextEntries(_CachedColumns):
    """What column callables that encode captions share."""

    def _write(self, keys: Mapping[str, str], encoded: _Encoded, *, required: bool = False) -> set[str]:
        """Write entries of embeddings `(n, length, dim)` without their padding, by caption.

        Returns:
            `set` of `str`: Captions whose embeddings are not finite. They have no entry.

        Raises:
            CacheError: For the first one, under `on_error="raise"` or if the entries are `required`.
        """
        values, mask, others = encoded
        real, broken = values.ne(0).any(-1) if mask is None else mask.ne(0), set()
        for row, (caption, key) in enumerate(keys.items()):
            end = max(int(real[row].nonzero().max()) + 1 if real[row].any() else 0, 1)
            entry = {"values": values[row, :end]}
            if mask is not None:
                entry["mask"] = mask[row, :end]
            entry |= {OTHER + name: others[name][row] for name in others}
            entry = {name: part.cpu() for name, part in entry.items()}
            if names := not_finite(entry):
                if required or self.config.on_error == "raise":
                    raise CacheError(
                        f"The text encoder makes NaN or infinite numbers ({', '.join(names)}) of the caption "
                        f"{caption!r}. Encode with another --mixed_precision, change the caption, or leave its rows "
                        "out with --on_error reject."
                    )
                broken.add(caption)
                continue
            self.cache.write(key, entry, about={"length": values.shape[1]})
        return broken


@dataclass(frozen=True, slots=True, kw_only=True)
class TextColumns(_TextEntries):
    """Encode captions into a cache and compute `text_key`, the key of each row's entry, or the keys of its captions.

    A batch function for [`map_columns`][hf_bucketing.columns.map_columns] and `Dataset.map(batched=True)`. All
    captions of a row are encoded, identical ones share an entry, and entries that exist are not encoded again.
    Trailing padding is not stored: tokens that the mask excludes or, without a mask, that are zero. An entry keeps the
    padded `length`, and the collator restores what the encoder returned.

    Args:
        encode (callable): Encodes captions to embeddings `(n, length, dim)`, a mask `(n, length)` or None, and a
            mapping of what else the model takes of a caption, `(n, …)` each.
        model (`str`): Fingerprint of all that `encode` depends on.
        column (`str`): Column of a text or a list of texts.
        config ([`CacheConfig`]): Folder of the entries, and captions per call of `encode`.
        counts (`Counter`): Numbers of distinct captions per batch that were `encoded`, `found` in the cache, or
            `not finite`; the keys of these are empty.
    """

    encode: Callable[[list[str]], _Encoded]
    column: str

    optional_columns = ()
    output_columns = ("text_key",)

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must hold."""
        return (self.column,)

    def key(self, caption: str) -> str:
        """Return the key of a caption's entry."""
        return entry_key(kind="text", model=self.model, caption=caption)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Write missing entries and return the key of each caption's entry, in lists where a row has a list.

        Raises:
            ColumnError: If a caption is neither a text nor a list of texts.
            CacheError: Under `on_error="raise"`, for the first caption whose embeddings are not finite.
        """
        cells = list(batch[self.column])
        texts = [texts_of({self.column: cell}, self.column) for cell in cells]
        keys = {caption: self.key(caption) for captions in texts for caption in captions}
        missing = [caption for caption, key in keys.items() if not self.cache.holds(key)]
        for start in range(0, len(missing), self.config.batch_size):
            captions = missing[start : start + self.config.batch_size]
            broken = self._write({caption: keys[caption] for caption in captions}, self.encode(captions))
            keys |= dict.fromkeys(broken, "")
            self.counts.update({"encoded": len(captions) - len(broken), "not finite": len(broken)})
        self.counts.update(found=len(keys) - len(missing))
        row_keys = ([keys[caption] for caption in captions] for captions in texts)
        pairs = zip(cells, row_keys, strict=True)
        return {"text_key": [key[0] if isinstance(cell, str) else key for cell, key in pairs]}

    @property
    def null_key(self) -> str:
        """Key of the entry of the text that stands for a dropped caption."""
        return entry_key(kind="null text", model=self.model)

    def write_null(self, encode: Callable[[], _Encoded]) -> None:
        """Write the entry of the text that stands for a dropped caption, `(1, length, dim)`, unless it exists."""
        missing = not self.cache.holds(self.null_key)
        if missing:
            self._write({"": self.null_key}, encode(), required=True)
        self.counts.update(encoded=int(missing), found=int(not missing))


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeingTextColumns(_TextEntries):
    """Encode the captions of rows for a text encoder that sees their references too, and compute `text_key`.

    As [`TextColumns`], but an entry belongs to one view of a sample, whose key in the cache of latents is part of its
    own. Also computes `null_text_key`, the key of the empty caption beside the same references. Rejected rows get
    empty keys. With several views, the cells of both columns list what they would hold for each view.

    Args:
        encode (callable): Encodes captions and, as `references`, a tuple of pictures `(3, F, h, w)` in [−1, 1] for
            each; returns what that of [`TextColumns`] does.
        column (`str`): Column of a text or a list of texts.
        latents ([`LatentColumns`]): What makes the samples.
    """

    encode: Callable[..., _Encoded]
    column: str
    latents: LatentColumns

    output_columns = ("text_key", NULL_TEXT_KEY)

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must hold."""
        return (*self.latents.input_columns, self.column)

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Columns that are read where a batch holds them."""
        return self.latents.optional_columns

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Write missing entries and return the keys of each row.

        Raises:
            ColumnError: If a caption is neither a text nor a list of texts.
            MediaError: Under `on_error="raise"`, for the first unreadable file; the message names it.
            CacheError: Under `on_error="raise"`, for the first caption whose embeddings are not finite.
        """
        _, samples = self.latents._samples(batch)
        columns: dict[str, list[Any]] = {name: [] for name in self.output_columns}
        for cell, views in zip(batch[self.column], samples, strict=True):
            captions = texts_of({self.column: cell}, self.column)
            keys = [self._keys_of(captions, sample) for sample in views]
            row_keys = [[of_view[caption] for caption in captions] for of_view in keys]
            columns["text_key"].append(_cell([texts[0] if isinstance(cell, str) else texts for texts in row_keys]))
            columns[NULL_TEXT_KEY].append(_cell([of_view[""] for of_view in keys]))
        return columns

    def _keys_of(self, captions: Sequence[str], sample: _Sample | None) -> dict[str, str]:
        """Return the keys of a row's captions and of the empty one, after writing the entries that are missing."""
        nothing = dict.fromkeys([*captions, ""], "")
        if sample is None:
            return nothing
        keys = {
            caption: entry_key(kind="text", model=self.model, caption=caption, sample=sample.key)
            for caption in nothing
        }
        missing = [caption for caption, key in keys.items() if not self.cache.holds(key)]
        if missing:
            try:
                references = load(sample.file).conditions[REFERENCE]
            except MediaError:
                if self.config.on_error == "raise":
                    raise
                return nothing
            encoded = self.encode(missing, references=[references] * len(missing))
            broken = self._write({caption: keys[caption] for caption in missing}, encoded)
            self.counts.update({"encoded": len(missing) - len(broken), "not finite": len(broken)})
            if broken:
                return nothing
        self.counts.update(found=len(keys) - len(missing))
        return keys


def _on_cpu(values: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    return values.cpu() if isinstance(values, torch.Tensor) else [tensor.cpu() for tensor in values]


def _not_finite(file: FileSample, names: Sequence[str]) -> str:
    """Return what to do about a file of which the model makes NaN or infinite numbers."""
    return (
        f"{file.source.path} cannot be encoded: the model makes NaN or infinite numbers of it ({', '.join(names)}). "
        "Remove or change the file, or leave its row out with --on_error reject."
    )


def _cell(views: Sequence[Any]) -> Any:
    """Return the cell of a row: what its only view has, or a list with what each of several has."""
    return views[0] if len(views) == 1 else views


def _may_be_transparent(sample: FileSample) -> bool:
    """Return whether any file of a sample can hold transparent parts, so that its latents depend on the background."""
    files = [sample.source]
    for source in sample.conditions.values():
        files += source if isinstance(source, tuple) else [] if source is None else [source]
    return any(read_header(file).may_be_transparent for file in files)


def _identities(source: MediaSource | Sequence[MediaSource] | None, root: str | None) -> list[Any] | None:
    """Return what identifies the file of a condition, or each of its files; None where there is none."""
    if source is None or isinstance(source, MediaSource):
        return None if source is None else _identity(source, root)
    return [_identity(file, root) for file in source]


def _identity(source: MediaSource, root: str | None) -> list[Any]:
    """Return what identifies a file's content and decoding, unchanged when the folder of all files is moved."""
    content = [*source.version(), *decoding_rules(source)]
    if source.data is not None:
        return content
    full_path = root is None or is_url(root) or is_url(source.path)
    return [source.path if full_path else os.path.relpath(source.path, root), *content]
