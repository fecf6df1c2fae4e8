"""Whether the caches of a run belong to its model, and how long their texts are; checked before weights are loaded."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..caching.encoders import describe_encoders, differences
from ..caching.fingerprints import latents_fingerprint
from ..columns.prepared import CacheInfo, PreparedDataset
from ..command_line.config_file import CONFIG_FILE
from ..configuration.run import TrainingConfig
from ..errors import BucketingError
from ..models.loading import Loading
from ..models.recipe import Recipe
from ..models.registry import recipe_of
from ..settings import changed

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
