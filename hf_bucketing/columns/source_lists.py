"""The sources of a run: their lists in flags, YAML and other trainers' files, their names and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from datasets import Dataset

from ..buckets.arrays import FloatArray
from ..command_line.config_file import SOURCES, ConfigFile, Entry
from ..command_line.flags import FlagParser
from ..errors import BucketingError, ColumnError, FlagError
from ..settings import build, flatten, marked, names_of
from .arrays import column_array, numbers
from .settings import SourceConfig
from .trainer_toml import load_repeats, load_toml


def sources_from(values: Mapping[str, Any], file: ConfigFile | None = None) -> list[SourceConfig]:
    """Return the sources that a script's flags name, or its YAML file lists; `--dataset` comes before the file.

    What a source of the file does not give is taken from the flags, then from the top of the file.

    Args:
        values (mapping of `str` to any): Values of flags: `dataset`, a list of names or None, and the other settings
            of [`SourceConfig`]; all else is ignored.
        file ([`ConfigFile`], *optional*): File of settings.

    Raises:
        FlagError: If no source is named, or the list in the file is none, or has a wrong setting.
        BucketingError: If a source cannot be as its settings say.
    """
    common = {name: values[name] for name in names_of(SourceConfig) if name in values}
    datasets = common.pop("dataset")
    entry = None if file is None else file.entries.get(SOURCES)
    if entry is None or file is None:
        if not datasets:
            raise FlagError("Give --dataset, or a file with `sources` as --config.")
        return make_sources(common, [{"dataset": dataset} for dataset in datasets])
    if datasets and _names_dataset(file):
        raise FlagError(f"{file.where(entry)}: the file names both a dataset and {SOURCES}; keep one of them.")
    if datasets:
        return make_sources(common, [{"dataset": dataset} for dataset in datasets])
    return make_sources(common, read_listed(file))


def read_listed(file: ConfigFile) -> list[dict[str, Any]]:
    """Return the settings by name of each source that a config file lists; none if it has no list.

    Raises:
        FlagError: If the list is none, or has a wrong setting or a source without a dataset.
    """
    entry = file.entries.get(SOURCES)
    if entry is None:
        return []
    if not isinstance(entry.value, list) or not all(isinstance(item, dict) for item in entry.value) or not entry.value:
        raise FlagError(f"{file.where(entry)}: {SOURCES} must be a list of mappings, each with a dataset.")
    parser = FlagParser(None)
    parser.add_settings(SourceConfig, listed=True)
    sources = []
    for settings in entry.value:
        sources.append(parser.read_settings(file, settings))
        if sources[-1].get("dataset") is None:
            line = min((inner.line for inner in settings.values()), default=entry.line)
            raise FlagError(f"{file.path}, line {line}: this source has no dataset.")
    return sources


def make_sources(
    common: Mapping[str, Any], sources: Sequence[Mapping[str, Any]], *, say: Callable[[str], None] = print
) -> list[SourceConfig]:
    """Build sources from their settings by name; those that one does not give are taken from `common`.

    A source with a bucket table of its own takes none from `common`. A TOML file of another trainer, or a folder of
    folders such as `10_a fox`, stands for the sources that it lists; `say` is called with a sentence about each of its
    keys that has no effect.
    """
    return [build(SourceConfig, settings) for settings in complete_settings(common, sources, say=say)]


def complete_settings(
    common: Mapping[str, Any], sources: Sequence[Mapping[str, Any]], *, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the settings of sources by name as [`make_sources`] takes them, with those of `common`."""
    listed = (settings for source in sources for settings in _listed(source, say))
    return [{**_inherited(common, settings), **settings} for settings in listed]


def settings_of_sources(sources: Sequence[SourceConfig]) -> list[dict[str, Any]]:
    """Return all settings of sources by name, complete, as a YAML file lists them; those that are None have none."""
    hidden = [name for name, flag in marked(SourceConfig, "flag").items() if not flag]
    names = name_sources([(source.dataset, source.name) for source in sources])
    return [
        {
            name: value
            for name, value in {**flatten(source), "name": unique}.items()
            if value is not None and name not in hidden
        }
        for unique, source in zip(names, sources, strict=True)
    ]


def _inherited(common: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    tables = marked(SourceConfig, "one_of")
    has_table = any(settings.get(name) is not None for name in tables)
    return {name: value for name, value in common.items() if not (has_table and name in tables)}


def _listed(source: Mapping[str, Any], say: Callable[[str], None]) -> Iterator[Mapping[str, Any]]:
    dataset = source["dataset"]
    toml = Path(dataset).suffix.lower() == ".toml"
    listed = load_toml(dataset) if toml else None if "repeats" in source else load_repeats(dataset)
    if listed is None:
        yield source
        return
    for sentence in listed.ignored:
        say(f"{dataset}: {sentence}")
    yield from ({**source, **settings} for settings in listed.sources)


def _names_dataset(file: ConfigFile) -> bool:
    section = file.entries.get("prepare_dataset", Entry({}, 0)).value
    return "dataset" in file.entries or "dataset" in section


def name_sources(sources: Sequence[tuple[str, str | None]]) -> list[str]:
    """Return the name of each source: its own, or the last part of its path, or the whole path if several end alike.

    Args:
        sources (sequence of pairs): Path or name on the hub, and given name or None.

    Raises:
        BucketingError: If there is no source, or two have one name, such as the same folder twice.

    Example:
        >>> name_sources([("data/clips", None), ("data/faces.jsonl", None), ("old/clips", None), ("data/clips", "x")])
        ['data/clips', 'faces', 'old/clips', 'x']
    """
    if not sources:
        raise BucketingError("Name at least one source of data as `dataset`.")
    short = [name or PurePath(path).stem or path for path, name in sources]
    paths: dict[str, set[str]] = {}
    for stem, (path, name) in zip(short, sources, strict=True):
        paths.setdefault(stem, set()).update([] if name else [path])
    names = [
        name or (path if len(paths[stem]) > 1 else stem) for (path, name), stem in zip(sources, short, strict=True)
    ]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise BucketingError(
            f"Two sources are named {twice[0]}. To train rows more often, list a source once and give it `repeats`; "
            "to read it in two ways, give each a `name` of its own."
        )
    return names


def row_weights(
    datasets: Sequence[Dataset],
    *,
    columns: Sequence[str | None],
    repeats: Sequence[float],
    shares: Sequence[float | None],
) -> FloatArray | None:
    """Return the occurrences of each row per epoch, source after source, or None if every row occurs once.

    Rows that a column of their source weighs keep their proportions.

    Args:
        datasets (sequence of `Dataset`): Rows of each source with their `bucket_id`; rejected rows do not count.
        columns (sequence of `str`, *optional*): Column of the weights of each source's rows; None where all are 1.
        repeats (sequence of `float`): Occurrences per row, where there are no shares.
        shares (sequence of `float`, *optional*): Share of each source in an epoch of as many samples as all sources
            have by themselves; given for all sources or for none.

    Raises:
        BucketingError: If some sources alone have shares, or a source with one has no usable row.
        ColumnError: If a column of weights is missing, or holds anything but numbers of 0 or more.
    """
    stored = [_stored_weights(dataset, column) for dataset, column in zip(datasets, columns, strict=True)]
    factors = np.asarray(repeats, np.float64)
    targets = normalized_shares(shares)
    if targets is not None:
        kept = [column_array(dataset, "bucket_id") >= 0 for dataset in datasets]
        usable = np.array([weights[rows].sum() for weights, rows in zip(stored, kept, strict=True)])
        if not usable.all():
            raise BucketingError(
                f"All rows of source {int(usable.argmin())} are rejected, so it cannot have a `weight`; look at why, "
                "or remove it."
            )
        factors = targets * usable.sum() / usable
    if np.all(factors == 1) and not any(columns):
        return None
    return np.concatenate([weights * factor for weights, factor in zip(stored, factors, strict=True)])


def normalized_shares(shares: Sequence[float | None]) -> FloatArray | None:
    """Return the shares of sources, `(n,)`, whose sum is 1; None if none is given.

    Raises:
        BucketingError: If some sources alone have shares.
    """
    stated = [share for share in shares if share is not None]
    if stated and len(stated) < len(shares):
        raise BucketingError("Give all sources a `weight`, or none: it is a share among them.")
    return np.asarray(stated, np.float64) / sum(stated) if stated else None


def _stored_weights(dataset: Dataset, column: str | None) -> FloatArray:
    if column is None:
        return np.ones(len(dataset))
    weights = numbers({column: column_array(dataset, column)}, column).astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise ColumnError(
            f"{len(wrong)} of {len(weights)} rows have no weight of 0 or more in the column {column}, such as row "
            f"{wrong[0]}, which has {weights[wrong[0]]:g}; correct them."
        )
    return weights
