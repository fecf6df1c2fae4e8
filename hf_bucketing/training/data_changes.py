"""Whether the data and the caches of a run are those that it needs: what changed, and the lock that tells it."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..caching.encoders import describe_encoders, differences
from ..caching.fingerprints import latents_fingerprint
from ..caching.views import has_latents
from ..columns.arrays import spread
from ..columns.data_lock import LOCK_FILE, DataLock, compare_locks, read_lock
from ..columns.faults import NAMED_ROWS, listed, paths_of
from ..columns.prepared import CacheInfo, PreparedDataset
from ..command_line.config_file import CONFIG_FILE
from ..configuration.run import TrainingConfig
from ..errors import BucketingError
from ..files import complete_file
from ..models.loading import Loading
from ..models.recipe import Recipe
from ..models.registry import recipe_of
from ..settings import changed

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


_SCRIPT = "cache_latents"
"""Entry of a prepared folder's settings: those of the script that cached it."""


def settle_caches(config: TrainingConfig, folders: Mapping[str, PreparedDataset]) -> TrainingConfig:
    """Check the caches of a run, and return its settings with the `max_sequence_length` of their texts.

    Args:
        config ([`TrainingConfig`]): Settings of the run.
        folders (mapping of `str` to [`PreparedDataset`]): Its prepared folders.

    Raises:
        BucketingError: If a cache is of another model or of texts of another length, or does not say of which.
    """
    cached = {folder: prepared for folder, prepared in folders.items() if prepared.cache is not None}
    if not cached:
        if config.trust_cache:
            raise BucketingError(f"Omit `trust_cache`: {config.dataset_dir} holds no cache.")
        return config
    for folder, prepared in cached.items():
        length = sequence_length(
            config.max_sequence_length, prepared, folder=folder, model=config.pretrained_model_name_or_path
        )
        config = changed(config, max_sequence_length=length)
    if not config.trust_cache:
        for folder, prepared in cached.items():
            _check_encoders(config, prepared, folder=folder)
    return config


def sequence_length(chosen: int | None, prepared: PreparedDataset, *, folder: str, model: str) -> int | None:
    """Return the `max_sequence_length` of a run: that of cached texts, if there are some, or else the chosen one.

    Args:
        chosen (`int`, *optional*): Number in the run's settings; None stands for the pipeline's own.
        prepared ([`PreparedDataset`]): Rows of the run.
        folder (`str`): Their folder, for messages.
        model (`str`): Pipeline of the run.

    Raises:
        BucketingError: If another one is chosen than that of cached texts.
    """
    cache, recorded = prepared.cache, prepared.settings.get(_SCRIPT)
    if cache is None or cache.text_model is None:
        return chosen
    length = cache.max_sequence_length
    if length is None and recorded is not None:  # an earlier release, whose settings are texts in a file
        named = recorded.get("max_sequence_length")
        length = int(named) if named is not None else _load(model, prepared).max_sequence_length
    if length is None or chosen in (None, length):
        return length or chosen
    raise BucketingError(
        f"{folder} holds cached texts of {length} tokens, but `max_sequence_length` is {chosen}; omit it, or encode "
        f"the texts again: {_again(folder)} --max_sequence_length {chosen}"
    )


def _check_encoders(config: TrainingConfig, prepared: PreparedDataset, *, folder: str) -> None:
    """Raise BucketingError if other models than those of the run's pipeline made a cache."""
    cache, name = prepared.cache, config.pretrained_model_name_or_path
    assert cache is not None, "settle_caches looks for one"
    encoders = cache.encoders or _describe_earlier(prepared, cache, folder=folder)
    length, vae_file = config.max_sequence_length, config.vae_file
    running = describe_encoders(_load(name, prepared, max_sequence_length=length, vae_file=vae_file))
    if differing := differences(encoders, running, texts=cache.text_model is not None):
        made = encoders["pipeline"]
        raise BucketingError(
            f"{folder} was cached with {made['name_or_path']} ({made['class_name']}) and does not belong to {name} "
            f"({running['pipeline']['class_name']}): {'; '.join(differing)}. Cache it again, which encodes only what "
            f"differs: {_again(folder)} {_named(name, vae_file)}; or, if you know that it belongs to the model, give "
            "`trust_cache=True`."
        )


def _describe_earlier(prepared: PreparedDataset, cache: CacheInfo, *, folder: str) -> dict[str, Any]:
    """Describe the encoders of a cache that an earlier release made, by the pipeline that its settings name.

    Raises:
        BucketingError: If they name none, or it cannot be loaded, or is no longer what made the latents.
    """
    recorded = prepared.settings.get(_SCRIPT)
    why, name = f"its {CONFIG_FILE} does not name the pipeline", ""
    if recorded is not None:
        name = recorded["pretrained_model_name_or_path"]
        try:
            earlier = _load(name, prepared, parts=("vae",), vae_tiling=recorded.get("vae_tiling") == "true")
        except BucketingError as error:
            why = f"{name}, which made it, cannot be loaded ({error})"
        else:
            if latents_fingerprint(earlier) == cache.latents_model:
                return describe_encoders(earlier)
            why = f"the VAE in {name} is no longer the one that made it"
    raise BucketingError(
        f"{folder} was cached by an earlier release, and nothing tells whether it belongs to the run: {why}. Run "
        f"{_again(folder)} with the pipeline of the run, which encodes nothing that the cache holds of it; or, if you "
        "know that it belongs to the model, give `trust_cache=True`."
    )


def _load(name: str, prepared: PreparedDataset, *, max_sequence_length: int | None = None, **loading: Any) -> Recipe:
    """Load a pipeline without weights, or with those of some parts."""
    recipe = recipe_of(name)
    return recipe.load(
        name,
        max_sequence_length=max_sequence_length,
        trained=recipe.transformer_for(prepared.shown),
        loading=Loading(**{"parts": (), **loading}),
        audio=prepared.audio is not None,
    )


def _named(name: str, vae_file: str | None) -> str:
    """Return the flags that name a pipeline, and the file of its VAE."""
    flags = f"--pretrained_model_name_or_path {shlex.quote(name)}"
    return flags if vae_file is None else f"{flags} --vae_file {shlex.quote(vae_file)}"


def _again(folder: str) -> str:
    """Return the command that caches a folder again."""
    file = Path(folder) / CONFIG_FILE
    return "hf_bucketing cache" + (f" --config {shlex.quote(str(file))}" if file.is_file() else "")
