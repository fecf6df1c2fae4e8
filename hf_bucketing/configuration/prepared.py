"""Settings of preparing and of caching that a run is given, compared with those by which its folder was made.

One file may hold the settings of all scripts. A folder holds rows or latents as they were prepared or cached, so that
such a setting has no effect on a run that comes later: one that differs is refused. See docs/decisions/training.md.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..caching.settings import CacheConfig
from ..columns.settings import SourceConfig
from ..columns.source_lists import complete_settings, read_listed
from ..command_line.config_file import CACHE, CONFIG_FILE, PATHS, PREPARE, SOURCES, ConfigFile, Entry
from ..command_line.flags import FlagParser
from ..errors import BucketingError
from ..settings import flag_names, names_of
from .run import TrainingConfig

_COMMANDS = {PREPARE: "prepare", CACHE: "cache"}

_SPEED_ONLY = frozenset({"batch_size", "num_threads"})
"""Settings of a cache that change none of its entries."""

_OF_CACHE_ALONE = frozenset({"mixed_precision", "vae_tiling", "max_sequence_length", "condition"})
"""Settings of hf_bucketing cache beside those of `CacheConfig` that change its entries."""


class _Difference(NamedTuple):
    """A setting whose value is not that of the folder."""

    name: str
    current: Any
    made_with: Any
    source: str | None = None

    def __str__(self) -> str:
        name = self.name if self.source is None else f"{self.name} of {self.source}"
        return f"{name} is {_text(self.current)} and was {_text(self.made_with)}"


def check_same_settings(
    file: ConfigFile | None,
    folder: str,
    *,
    settings: Mapping[str, Any],
    flags: Mapping[str, Any] = MappingProxyType({}),
    cached: bool = True,
) -> None:
    """Check that settings of preparing and of caching are those by which a folder was made.

    Only what is given is compared, as values: a relative path may be an absolute one. Folders that do not hold their
    settings, such as those of earlier versions, pass.

    Args:
        file ([`ConfigFile`], *optional*): File of the settings of all scripts.
        folder (`str`): Folder that hf_bucketing prepare or hf_bucketing cache wrote.
        settings (mapping): Settings by which it was made, as its config.yaml holds them.
        flags (mapping of `str` to any): Settings of preparing that are given otherwise, before those of the file.
        cached (`bool`): Whether settings of caching are compared too.

    Raises:
        BucketingError: If some differ; the message has both values of each, and commands that make the folder again.
    """
    where = ConfigFile("this command", {}) if file is None else file
    of_rows = [*_differences_of_rows(where, folder, settings, flags)] if settings.get(SOURCES) else []
    of_cache = [*_differences_of_cache(where, settings)] if cached and settings.get(CACHE) else []
    if not of_rows and not of_cache:
        return
    differences = "; ".join(map(str, [*of_rows, *of_cache]))
    commands = _commands(file, folder, settings, rows=bool(of_rows))
    raise BucketingError(
        f"{folder}, which is read here, was made with other settings than those of {where.path}: {differences}. Give "
        f"the values that it was made with, or make it again: {' && '.join(commands)}"
    )


def _differences_of_rows(
    file: ConfigFile, folder: str, settings: Mapping[str, Any], flags: Mapping[str, Any]
) -> Iterator[_Difference]:
    """Yield the settings of preparing that differ from those of the sources of a folder."""
    common = _common_settings(file)
    common |= {name: value for name, value in flags.items() if name not in names_of(TrainingConfig)}
    datasets = common.pop("dataset", None)
    listed = [{"dataset": dataset} for dataset in datasets or []] or read_listed(file)
    made = settings[SOURCES]
    if not listed or (len(listed) == 1 and _same("dataset", listed[0]["dataset"], folder)):
        for name, value in common.items():  # a source may have a value of its own in place of the common one
            values = [_made_with(name, source, folder) for source in made]
            if not any(known and _same(name, value, other) for known, other in values) and all(
                known for known, _ in values
            ):
                yield _Difference(name, value, values[0][1])
        return
    lists = [source["dataset"] for source in listed if source["dataset"].lower().endswith(".toml")]
    if not all(map(os.path.exists, lists)):
        return  # this machine has what was made, and not what it was made of
    sources = complete_settings(common, listed, say=lambda sentence: None)
    if len(sources) != len(made):
        yield _Difference(
            SOURCES, [source["dataset"] for source in sources], [source.get("dataset") for source in made]
        )
        return
    for source, made_source in zip(sources, made, strict=True):
        for name, value in source.items():
            known, other = _made_with(name, made_source, folder)
            if known and not _same(name, value, other):
                yield _Difference(name, value, other, made_source.get("name") if len(made) > 1 else None)


def _common_settings(file: ConfigFile) -> dict[str, Any]:
    """Return the settings of preparing at the top of a file, and below the name of its script.

    At the top, names that training has too may be meant for it alone.
    """
    names = flag_names(SourceConfig)
    shared = {*names_of(TrainingConfig)}
    top = {name: file.entries[name] for name in names if name in file.entries and name not in shared}
    section = file.entries[PREPARE].value if PREPARE in file.entries else {}
    entries = {**top, **{name: entry for name, entry in section.items() if name in names}}
    return _parser_of_sources(several=True).read_settings(file, entries)


@functools.cache
def _parser_of_sources(*, several: bool) -> FlagParser:
    """Return the parser of the settings of one source, or of those that several share, with their datasets."""
    parser = FlagParser(None)
    parser.add_settings(SourceConfig, several=["dataset"] if several else [], listed=not several)
    return parser


def _made_with(name: str, source: Mapping[str, Any], folder: str) -> tuple[bool, Any]:
    """Return whether a folder says what a setting of one of its sources was, and its value.

    Settings that were None are not written; those of later versions are neither.
    """
    parser = _parser_of_sources(several=False)
    if name not in source:
        default = parser.get_default(name)
        return default is None, None
    file = ConfigFile(os.path.join(folder, CONFIG_FILE), {})
    return True, parser.read_settings(file, {name: Entry(source[name], 0)})[name]


def _differences_of_cache(file: ConfigFile, settings: Mapping[str, Any]) -> Iterator[_Difference]:
    """Yield the settings of caching that differ from those of a cached folder.

    At the top of a file, only those are compared that training has not: what it does with the others is its own.
    """
    names = {*flag_names(CacheConfig), *_OF_CACHE_ALONE} - _SPEED_ONLY
    section: Mapping[str, Entry] = file.entries[CACHE].value if CACHE in file.entries else {}
    entries = {name: file.entries[name] for name in names - {*names_of(TrainingConfig)} if name in file.entries}
    entries |= {name: entry for name, entry in section.items() if name in names}
    made = {name: Entry(value, 0) for name, value in settings[CACHE].items() if name in entries}
    parser = FlagParser(None)
    parser.add_settings(CacheConfig)
    for name in sorted(_OF_CACHE_ALONE):
        parser.add_argument(f"--{name}")
    current, was = parser.read_settings(file, entries), parser.read_settings(file, made)
    for name, value in current.items():
        if name in was and not _same(name, value, was[name]):
            yield _Difference(name, value, was[name])


def _commands(file: ConfigFile | None, folder: str, settings: Mapping[str, Any], *, rows: bool) -> list[str]:
    """Return the commands that make a folder again by a config file: its rows, and its cache if it has one."""
    cache, prepared = settings.get(CACHE) or {}, settings.get(PREPARE) or {}
    source = cache.get("dataset_dir") or folder
    names = {} if file is None else file.entries
    commands = []
    if rows:
        flags: dict[str, list[Any]] = {"output_dir": [source]}
        if SOURCES not in names and "dataset" not in names:
            flags["dataset"] = [made["dataset"] for made in settings[SOURCES] if made.get("dataset")]
        command = _command(PREPARE, file, flags, made_with=prepared)
        commands.append(command + " --streaming" * (prepared.get("streaming") == "true"))
    if cache:
        flags = {"dataset_dir": [source], "cache_dir": [cache.get("cache_dir")], "output_dir": [folder]}
        commands.append(_command(CACHE, file, flags, made_with=cache))
    return commands


def _command(
    script: str, file: ConfigFile | None, flags: Mapping[str, Sequence[Any]], *, made_with: Mapping[str, Any]
) -> str:
    model = "pretrained_model_name_or_path"
    words = ["hf_bucketing", _COMMANDS[script]]
    words += [] if file is None else ["--config", file.path]
    if (file is None or model not in file.entries) and made_with.get(model):
        flags = {**flags, model: [made_with[model]]}
    for name, values in flags.items():
        words += [f"--{name}", *(str(value) for value in values if value is not None)]
    return shlex.join(words)


def _same(name: str, current: Any, made_with: Any) -> bool:
    """Return whether two values of a setting mean the same."""
    if isinstance(current, (list, tuple)) and isinstance(made_with, (list, tuple)):
        pairs = zip(current, made_with, strict=False)
        return len(current) == len(made_with) and all(_same(name, value, other) for value, other in pairs)
    if name in PATHS and current is not None and made_with is not None:
        return _same_path(os.fspath(current), os.fspath(made_with))
    return bool(current == made_with)


def _same_path(current: str, made_with: str) -> bool:
    """Return whether two paths or names on the hub are one.

    A path from before a folder was moved, which leads nowhere any more, is compared by its last part.
    """
    if current == made_with or os.path.realpath(current) == os.path.realpath(made_with):
        return True
    moved = os.path.isabs(made_with) and not os.path.exists(made_with)
    return (
        moved and os.path.exists(current) and os.path.basename(os.path.abspath(current)) == os.path.basename(made_with)
    )


def _text(value: Any) -> str:
    """Return a value as a flag has it."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        joint = ";" if value and isinstance(value[0], (list, tuple)) else ","
        return joint.join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
