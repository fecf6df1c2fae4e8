"""Settings in a YAML file: read as the texts that flags would have, each with its line, and written.

Paths are written whole, so that a file means the same wherever it is read. One that a person wrote may name them
relative to its own folder, or to the working directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..errors import FlagError, did_you_mean
from ..files import existing_places
from ..formats import split_strength

PRESETS = Path(__file__).parents[1] / "presets"
"""Folder of runs that fit a model and a GPU, each of which `--config MODEL/GPU-TRAINED` names."""

ACCELERATE_CONFIGS = PRESETS.with_name("accelerate_configs")
"""Folder of accelerate's settings, which `hf_bucketing launch --config_file` also takes by name, such as `fsdp2`."""

CONFIG_FILE = "config.yaml"
"""File in a folder that a script wrote with the settings by which it did."""

SOURCES = "sources"
"""Name in a file under which sources of data are listed, each with settings of its own."""

PREPARE, CACHE, TRAIN = "prepare_dataset", "cache_latents", "train_text_to_video"
"""Names of the sections in a config file that the commands prepare, cache and train have to themselves."""

CACHED_DIR = "cached_dir"
"""Name in a file of the folder that hf_bucketing cache writes, and that training then reads."""

FROZEN_ADAPTERS = "frozen_adapters"
"""Name of the setting whose paths may have a strength behind them."""

PATHS = frozenset(
    {
        "pretrained_model_name_or_path",
        "init_from_adapters",
        FROZEN_ADAPTERS,
        "transformer_file",
        "vae_file",
        "cost_model",
        "validation_images",
        "validation_references",
        "dataset_dir",
        "validation_dataset_dir",
        "output_dir",
        "cache_dir",
        CACHED_DIR,
        "dataset",
        "table",
        "control_folder",
        "mask_folder",
        "face_folder",
        "reference_folder",
        "runs",
    }
)
"""Settings whose value is a path, or the name of something on the hub where there is no such path."""

_FOLDER = "_dir"
"""Ending of the names of those settings that are folders of this machine, also before they exist."""

_NULLS = ("", "~", "null", "Null", "NULL")


class Entry(NamedTuple):
    """A setting in a file, and the line where it stands."""

    value: Any
    line: int


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Settings that a YAML file holds.

    Numbers and words stay texts: the type of a setting decides what they mean, as on the command line, so that `1e-4`
    is a number and `no` a precision.

    Attributes:
        path (`str`): The file.
        entries (mapping of `str` to [`Entry`]): Its settings. The value is a text, None, a list of values, or a
            mapping of names to further entries.
    """

    path: str
    entries: Mapping[str, Entry]

    def where(self, entry: Entry) -> str:
        """Return the place of a setting for messages."""
        return f"{self.path}, line {entry.line}"

    def plain(self) -> dict[str, Any]:
        """Return the settings without their lines: texts and None, and lists and mappings of these."""
        return {name: _plain(entry) for name, entry in self.entries.items()}


def read_config_file(path: str, *, find_paths: bool = False) -> ConfigFile:
    """Read a config file.

    Args:
        path (`str`): The file, or the name of a preset.
        find_paths (`bool`): Whether a relative path that exists beside the file, and not in the working directory, is
            made whole; others stay as they are.

    Raises:
        FlagError: If the file does not exist, is empty, is not YAML, is not a mapping of names, or names a setting
            twice, or if a path that is to be found exists in both places.
    """
    presets = {name_of_preset(file): file for file in PRESETS.glob("*/*.yaml")}
    try:
        text = (Path(path) if os.path.exists(path) else presets.get(path, Path(path))).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        near = did_you_mean(path, presets)
        raise FlagError(
            f"--config {path}: there is no such file, and no such preset of a model and a GPU{near}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise FlagError(f"--config {path} cannot be read: {reason}.") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}, line {mark.line + 1}" if mark is not None else path
        raise FlagError(f"{place} is not YAML: {getattr(error, 'problem', None) or error}.") from error
    if node is None:
        raise FlagError(f"{path} is empty; write settings as `name: value`, one per line.")
    if not isinstance(node, yaml.MappingNode):
        raise FlagError(f"{path} must be a mapping of settings, `name: value` on each line, not a {_kind(node)}.")
    entries = _read_node(node, path, ())
    return ConfigFile(path, _with_full_paths(entries, path) if find_paths else entries)


def name_of_preset(file: Path) -> str:
    """Return how `--config` names a file of [`PRESETS`].

    Example:
        >>> name_of_preset(PRESETS / "wan-14b" / "24gb-lora.yaml")
        'wan-14b/24gb-lora'
    """
    return f"{file.parent.name}/{file.stem}"


def write_config(values: Mapping[str, Any], *, comment: str = "") -> str:
    """Return settings as YAML that [`read_config_file`] reads back as they are, with paths made whole.

    Args:
        values (mapping of `str` to any): Numbers, texts, None, booleans, paths, and lists and mappings of these.
        comment (`str`): Lines above them.
    """
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    text: str = yaml.dump(_as_texts(values), Dumper=_Writer, sort_keys=False, allow_unicode=True, width=110)
    return head + text


def _with_full_paths(value: Any, path: str) -> Any:
    """Return the entries of a file with paths that exist beside it, and not in the working directory, made whole."""
    if isinstance(value, list):
        return [_with_full_paths(item, path) for item in value]
    if not isinstance(value, dict):
        return value

    def located(text: Any, entry: Entry, name: str) -> Any:
        if isinstance(text, list):
            return [located(item, entry, name) for item in text]
        if not isinstance(text, str) or not text:
            return text
        named, strength = split_strength(text) if name == FROZEN_ADAPTERS else (text, "")
        places = existing_places(named, folder=os.path.dirname(path))
        if len(places) > 1:
            raise FlagError(
                f"{path}, line {entry.line}: {name} {named} may be {' or '.join(places)}; both exist, so write the "
                "whole path."
            )
        return places[0] + strength if places and not os.path.exists(named) else text

    return {
        name: entry._replace(
            value=located(entry.value, entry, name) if name in PATHS else _with_full_paths(entry.value, path)
        )
        for name, entry in value.items()
    }


class _Writer(yaml.SafeDumper):
    """Write texts without quotes where YAML allows it, also those that look like numbers; quote only `null`."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own declaration)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Writer.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$"), ["~", "n", "N", ""])


def _as_texts(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {str(name): _as_texts(setting, str(name)) for name, setting in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_as_texts(item, name) for item in value]
    if value and name in PATHS and (name.endswith(_FOLDER) or os.path.exists(value)):
        return os.path.abspath(value)
    named, strength = split_strength(value) if name == FROZEN_ADAPTERS and value else ("", "")
    if os.path.exists(named):
        return os.path.abspath(named) + strength
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


def _read_node(node: yaml.Node, path: str, above: tuple[int, ...]) -> Any:
    if id(node) in above:
        raise FlagError(f"{path}, line {node.start_mark.line + 1}: a value contains itself.")
    above = (*above, id(node))
    if isinstance(node, yaml.ScalarNode):
        return None if node.style is None and node.value in _NULLS else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_read_node(item, path, above) for item in node.value]
    entries: dict[str, Entry] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise FlagError(f"{path}, line {line}: the name of a setting must be a word, not a {_kind(key)}.")
        if key.value in entries:
            raise FlagError(
                f"{path}, line {line}: {key.value} is given twice, before on line {entries[key.value].line}; keep one."
            )
        entries[key.value] = Entry(_read_node(value, path, above), line)
    return entries


def _plain(value: Any) -> Any:
    if isinstance(value, Entry):
        return _plain(value.value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, dict) else value


def _kind(node: yaml.Node) -> str:
    return {"sequence": "list", "scalar": "single value", "mapping": "mapping"}[node.id]
