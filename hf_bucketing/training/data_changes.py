"""What changed in the data of a run: since it was prepared, cached or begun, and the lock by which a run knows it."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..caching.views import has_latents
from ..columns.arrays import spread
from ..columns.data_lock import LOCK_FILE, DataLock, compare_locks, read_lock
from ..columns.faults import NAMED_ROWS, listed, paths_of
from ..columns.prepared import PreparedDataset
from ..configuration.run import TrainingConfig
from ..files import complete_file

LOOKED_AT = 10_000
"""Files of a cache and of captions, and captions, that a run looks at before it starts, spread evenly over rows."""


def keep_lock(config: TrainingConfig) -> None:
    """Keep the lock of the rows of a new run in its output folder; a stream has none."""
    source, kept = (Path(folder, LOCK_FILE) for folder in (config.dataset_dir, config.output_dir))
    kept.unlink(missing_ok=True)
    if source.is_file():
        with complete_file(kept) as partial:
            shutil.copyfile(source, partial)


def describe_changes(config: TrainingConfig, prepared: PreparedDataset | None, *, resumed: bool) -> list[str]:
    """Return sentences on what changed in the rows of a run since it began, in those of its cache, and in captions.

    A stream has no rows that are known before they come.
    """
    if prepared is None:
        return []
    sentences = describe_edited_texts(prepared, config.dataset_dir)
    lock = read_lock(config.dataset_dir)
    if lock is None:
        return sentences
    began = read_lock(config.output_dir) if resumed else None
    if began is not None and (changes := compare_locks(began, lock).describe()):
        sentences.append(f"{config.dataset_dir} is not as it was when the run began. {changes}")
    return sentences if prepared.cache is None else sentences + _describe_cache(prepared, lock, config.dataset_dir)


def describe_edited_texts(prepared: PreparedDataset, folder: str) -> list[str]:
    """Return a sentence on files of captions that were edited after rows were prepared from them, if there are any.

    Of files beside media, up to 10,000 are looked at.
    """
    edited: list[str] = []
    looked_at = 0
    for number, texts in enumerate(prepared.texts):
        files = [*texts.files]
        if texts.extension is not None:
            ids = prepared.source_ids
            rows = np.arange(len(prepared.dataset)) if ids is None else np.flatnonzero(ids == number)
            media = paths_of(prepared.dataset, spread(rows, LOOKED_AT).tolist(), prepared.column)
            stems = dict.fromkeys(os.path.splitext(file)[0] for file in media if file is not None)  # of clips, one
            files = [os.path.join(prepared.root or "", stem + texts.extension) for stem in stems]
        looked_at += len(files)
        edited += texts.edited(files)
    if not edited:
        return []
    names = listed(edited[:NAMED_ROWS], total=len(edited), separator=", ")
    return [
        f"Of {looked_at:,} files of captions looked at, {len(edited):,} were edited after {folder} was prepared from "
        f"them: {names}. The captions are as they were then; run hf_bucketing prepare again"
        f"{' and hf_bucketing cache' if prepared.cache is not None else ''} to use others."
    ]


def _describe_cache(prepared: PreparedDataset, lock: DataLock, folder: str) -> list[str]:
    """Return sentences on what changed in the rows and files of a cache since they were encoded."""
    assert prepared.cache is not None, "describe_changes calls it for a cache"
    usable = has_latents(prepared.dataset)
    sentences, again = [], "Run hf_bucketing cache again, which encodes only what changed."
    source = prepared.cache.prepared
    earlier = None if source is None else read_lock(source)
    if earlier is not None:
        changes = compare_locks(lock, earlier)
        kept = usable[changes.was]  # others were rejected because they could not be encoded
        fields = {name: differs[kept] for name, differs in changes.fields.items()}
        removed = changes.removed[usable[changes.removed]]
        changes = replace(changes, removed=removed, was=changes.was[kept], now=changes.now[kept], fields=fields)
        if said := changes.describe():
            sentences.append(f"{source} was prepared again since {folder} was cached from it. {said} {again}")
    rows = spread(np.flatnonzero(usable), LOOKED_AT)
    present = prepared.lock_rule.lock(prepared.dataset.select(rows))
    stale = rows[(present.file != lock.file[rows]) | (present.conditions != lock.conditions[rows])]
    if len(stale):
        names = listed(prepared.file_names(stale[:NAMED_ROWS].tolist()), total=len(stale), separator=", ")
        sentences.append(
            f"Of {len(rows):,} samples looked at, the files of {len(stale):,} are not those that {folder} was cached "
            f"from: {names}. Run hf_bucketing prepare and hf_bucketing cache again, or train on what was "
            "encoded."
        )
    return sentences
