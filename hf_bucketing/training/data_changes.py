"""What changed in the data of a run: since it began, since it was cached, and the lock by which a run knows it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..caching.keys import has_latents
from ..columns.data_changes import compare_locks
from ..columns.data_lock import LOCK_FILE, DataLock, read_lock
from ..columns.faults import NAMED_ROWS, listed
from ..columns.prepared import PreparedDataset
from ..files import complete_file
from .config import TrainingConfig

_LOOKED_AT = 10_000
"""Files of a cache that a run looks at before it starts, spread evenly over its rows."""


def keep_lock(config: TrainingConfig) -> None:
    """Keep the lock of the rows of a new run in its output folder; a stream has none."""
    source, kept = (Path(folder, LOCK_FILE) for folder in (config.dataset_dir, config.output_dir))
    kept.unlink(missing_ok=True)
    if source.is_file():
        with complete_file(kept) as partial:
            shutil.copyfile(source, partial)


def describe_changes(config: TrainingConfig, prepared: PreparedDataset | None, *, resumed: bool) -> list[str]:
    """Return sentences on what changed in the rows of a run since it began, and in those of its cache.

    A stream has no rows that are known before they come.
    """
    lock = None if prepared is None else read_lock(config.dataset_dir)
    if prepared is None or lock is None:
        return []
    sentences = []
    began = read_lock(config.output_dir) if resumed else None
    if began is not None and (changes := compare_locks(began, lock).describe()):
        sentences.append(f"{config.dataset_dir} is not as it was when the run began. {changes}")
    return sentences if prepared.cache is None else sentences + _describe_cache(prepared, lock, config.dataset_dir)


def _describe_cache(prepared: PreparedDataset, lock: DataLock, folder: str) -> list[str]:
    """Return sentences on what changed in the rows and files of a cache since they were encoded."""
    assert prepared.cache is not None, "describe_changes calls it for a cache"
    usable = has_latents(prepared.dataset)
    sentences, again = [], "Run scripts/cache_latents.py again, which encodes only what changed."
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
    rows = np.flatnonzero(usable)
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _LOOKED_AT)).astype(np.int64))]
    present = prepared.lock_rule.lock(prepared.dataset.select(rows))
    stale = rows[(present.file != lock.file[rows]) | (present.conditions != lock.conditions[rows])]
    if len(stale):
        names = listed(prepared.file_names(stale[:NAMED_ROWS].tolist()), total=len(stale), separator=", ")
        sentences.append(
            f"Of {len(rows):,} samples looked at, the files of {len(stale):,} are not those that {folder} was cached "
            f"from: {names}. Run scripts/prepare_dataset.py and scripts/cache_latents.py again, or train on what was "
            "encoded."
        )
    return sentences
