"""Encode a prepared data set once, on any number of processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm

from ..buckets.arrays import stored_column
from ..buckets.assignment import Rejection
from ..buckets.sizes import Size
from ..columns.apply import map_columns, with_columns
from ..columns.arrays import column_array
from ..columns.buckets import BucketColumns
from ..columns.captions import all_texts
from ..columns.prepared import CacheInfo, PreparedDataset
from ..conditions.names import REFERENCE
from ..errors import BucketingError
from ..plans.ways import stacks
from .columns import LatentColumns, Media, SeeingTextColumns, TextColumns
from .encoders import describe_encoders
from .fingerprints import Encoder, latents_fingerprint, text_fingerprint
from .settings import CacheConfig
from .store import TensorCache
from .views import has_keys

_STACKS_PER_CALL = 8

_Texts: TypeAlias = TextColumns | SeeingTextColumns


def cache_dataset(
    prepared: PreparedDataset, encoder: Encoder, config: CacheConfig
) -> tuple[PreparedDataset | None, Counter[str]]:
    """Encode what the cache lacks; each of accelerate's processes takes its share of the rows.

    Args:
        prepared ([`PreparedDataset`][hf_bucketing.columns.PreparedDataset]): Prepared for the encoder's model.
        encoder ([`Encoder`]): A loaded recipe, on its device and in its dtype.
        config ([`CacheConfig`]): Folder, views, and settings of decoding and encoding.

    Returns:
        `tuple`: The data set with `latents_key` and `text_key` columns and its `cache`, on the main process (None on
        others), and how many rows and captions of all processes were encoded, found, unreadable or rejected.

    Raises:
        BucketingError: If samples are too short for the encoder's model, it is not shown their conditions, or
            `random_resize` meets images at the sizes of videos.
        MediaError: Under `on_error="raise"`, for a file that is unreadable, or encoded to numbers that are not finite.
        CacheError: Under `on_error="raise"`, for a caption whose embeddings are not finite.
    """
    encoder.check_conditions(prepared.shown)
    state = PartialState()
    if state.is_main_process:
        TensorCache(config.folder).sweep()
    state.wait_for_everyone()
    rows, latents = _latents(prepared, encoder, config)
    buckets = column_array(rows, "bucket_id")
    encoder.check_frames(latents.table, buckets[buckets >= 0])
    order = np.argsort(buckets, kind="stable")  # by bucket, so that stacks are full
    columns = [*latents.input_columns, *(name for name in latents.optional_columns if name in rows.column_names)]
    _encode_share(rows.select_columns(columns).select(order), latents, state, desc="latents")
    text: _Texts | None = None
    if prepared.caption_column is not None and encoder.text_sees_references and REFERENCE in prepared.shown:
        text = _seeing(prepared.caption_column, encoder, latents)
        names = [*columns, prepared.caption_column]
        _encode_share(rows.select_columns(names).select(order), text, state, desc="texts")
    elif prepared.caption_column is not None:
        text = TextColumns(
            encode=encoder.encode_text, model=text_fingerprint(encoder), column=prepared.caption_column, config=config
        )
        more = config.more_captions or []
        captions = Dataset.from_dict({text.column: sorted({*all_texts(prepared.dataset, text.column), *more})})
        _encode_share(captions, text, state, desc="texts")
        if state.is_main_process:
            text.write_null(encoder.encode_null)
    mine = {**latents.counts, **{f"captions {name}": n for name, n in (text.counts if text else {}).items()}}
    state.wait_for_everyone()
    counts: Counter[str] = sum((Counter(part) for part in gather_object([mine])), Counter())
    if not state.is_main_process:
        return None, counts
    keyed = map_columns(rows, replace(latents, counts=Counter()), overwrite=True)
    if isinstance(text, SeeingTextColumns) or text is not None:
        keyed = map_columns(keyed, replace(text, counts=Counter()), overwrite=True)
    dataset = _with_keys(prepared.dataset, keyed, () if text is None else text.output_columns, buckets)
    info = CacheInfo(
        folder=config.folder,
        batching=config.batching,
        latents_model=latents.model,
        text_model=None if text is None else text.model,
        empty_text_key=text.null_key if isinstance(text, TextColumns) else None,
        views={**asdict(config.views), "seed": config.seed},
        views_per_sample=config.views_per_sample,
        random_resize=config.random_resize,
        appended_frames=config.appended_frames,
        max_sequence_length=None if text is None else encoder.max_sequence_length,
        encoders=describe_encoders(encoder),
    )
    return replace(prepared, dataset=dataset, cache=info), counts


def _latents(prepared: PreparedDataset, encoder: Encoder, config: CacheConfig) -> tuple[Dataset, LatentColumns]:
    """Return the rows with the buckets whose sizes are cached, and the column callable."""
    at_buckets = stacks(config.batching)
    table = prepared.table if at_buckets else prepared.open_table
    rows = prepared.dataset
    if config.random_resize is not None and prepared.open_table.image_sizes is not None:
        raise BucketingError(
            "Omit `random_resize`: images cannot take both sizes of videos and sizes drawn at random; prepare them "
            "without `image_sizes`."
        )
    if not at_buckets:
        rows = map_columns(rows, BucketColumns(table, prepared.spec), overwrite=True)
    device = encoder.pipeline.vae.device

    def encode(pixels: torch.Tensor, conditions: Media) -> Mapping[str, torch.Tensor | Sequence[Any]]:
        moved: Media = {name: [_on(device, value) for value in values] for name, values in conditions.items()}
        if config.appended_frames is not None:
            latent_frames = prepared.spec.latent_size(Size(*pixels.shape[2:]))[0] - prepared.spec.num_repeats
            moved = {**moved, **encoder.keyframes_at([config.appended_at(latent_frames)] * len(pixels))}
        return encoder.encode_media(pixels.to(device), moved)

    columns = LatentColumns(
        encode=encode,
        model=latents_fingerprint(encoder),
        table=table,
        files=prepared.files,
        config=config,
    )
    return rows, columns


def _seeing(column: str, encoder: Encoder, latents: LatentColumns) -> SeeingTextColumns:
    """Return the column callable of captions for a text encoder that sees references."""
    if latents.config.more_captions:
        raise BucketingError(
            "Omit `more_captions`: the text encoder sees the references of a sample, so captions without a sample "
            "cannot be cached."
        )
    device = encoder.pipeline.text_encoder.device

    def encode(captions: list[str], references: Sequence[Sequence[torch.Tensor]]) -> Any:
        return encoder.encode_text(captions, references=[_on(device, pictures) for pictures in references])

    return SeeingTextColumns(
        encode=encode, model=text_fingerprint(encoder), column=column, config=latents.config, latents=latents
    )


def _on(device: torch.device, value: Any) -> Any:
    """Return a tensor, or a tuple of tensors, on a device."""
    return value.to(device) if isinstance(value, torch.Tensor) else tuple(tensor.to(device) for tensor in value)


def _encode_share(
    rows: Dataset, columns: LatentColumns | TextColumns | SeeingTextColumns, state: PartialState, *, desc: str
) -> None:
    """Encode this process's share of the rows, in their order."""
    share = rows.shard(state.num_processes, state.process_index, contiguous=True)
    with tqdm(total=len(share), desc=desc, disable=not state.is_main_process) as bar, torch.no_grad():
        for batch in share.iter(batch_size=columns.config.batch_size * _STACKS_PER_CALL):
            keys, *_ = columns(batch).values()
            bar.update(len(keys))


def _with_keys(dataset: Dataset, keyed: Dataset, texts: Sequence[str], bucket_ids: np.ndarray) -> Dataset:
    """Add the keys, of texts in some columns; rows that lack some get the values that unreadable rows have."""
    names = ("latents_key", *texts)
    complete = np.all([has_keys(keyed, name) for name in names], axis=0)
    unreadable = ~complete & (bucket_ids >= 0)
    columns: dict[str, Any] = {name: stored_column(keyed, name).combine_chunks() for name in names}
    if unreadable.any():
        marks = {"width": -1, "height": -1, "num_frames": -1, "bucket_id": -1, "num_tokens": 0}
        for name, mark in {**marks, "rejection": Rejection.UNREADABLE.label}.items():
            old = column_array(dataset, name)
            columns[name] = np.where(unreadable, np.array(mark, old.dtype if old.dtype.kind == "i" else None), old)
    return with_columns(dataset, columns)
