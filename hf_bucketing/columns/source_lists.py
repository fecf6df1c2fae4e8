"""The sources of a run: from flags, from a list in its YAML file, or from another trainer's file that lists some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..command_line.config_file import SOURCES, ConfigFile, Entry
from ..command_line.flags import FlagParser
from ..errors import FlagError
from ..settings import build, flatten, marked, names_of
from .settings import SourceConfig
from .shares import name_sources
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
