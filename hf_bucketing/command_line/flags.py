"""The parser of all scripts: flags from dataclasses, with their docstrings as help and "did you mean"."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin

from ..errors import BucketingError, FlagError, did_you_mean, quoted
from ..settings import Setting, build, choices, names_of, parts_of, settings_in, without_links
from .config_file import CACHED_DIR, SOURCES, ConfigFile, Entry, read_config_file
from .help import FlagHelp, short_help

Config = TypeVar("Config")

_REMOVED = {"validation_max_tokens": "prompts are rendered one after another"}
"""Settings of earlier releases, with what happens without them."""


class _ShowHelp(argparse.Action):
    """Print the help of a script, and end it; the value `all` asks for every flag."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs="?", metavar="all", default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        assert isinstance(parser, FlagParser)
        print(parser.format_help() if values == "all" else short_help(parser, parser.common), end="")
        parser.exit()


class _Several(argparse.Action):
    """Keep all values of a flag that takes several, also where it is repeated, in place of those of a file."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        assert isinstance(parser, FlagParser)
        earlier = getattr(namespace, self.dest) if self.dest in parser.lists_on_command_line else []
        setattr(namespace, self.dest, [*earlier, *values])
        parser.lists_on_command_line.add(self.dest)


class _ConfigRule(NamedTuple):
    """What a script takes of a config file; the arguments of [`FlagParser.add_config`]."""

    script: str
    others: Callable[[], Mapping[str, Collection[str]]]
    names: Mapping[str, Sequence[str]]


class FlagParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` as all scripts use it.

    A flag is the name of a setting after two hyphens, with underscores and in full. Errors are [`FlagError`]s of one
    line, which [`run_script`][hf_bucketing.command_line.script.run_script] prints.

    Args:
        description (`str`, *optional*): Description above the flags, usually the script's `__doc__`.
        kinds (dataclass types): Configurations whose settings become flags, as
            [`add_settings`][FlagParser.add_settings] adds them.
    """

    def __init__(self, description: str | None, *kinds: type) -> None:
        self._arguments: dict[str, str] = {}
        self._config: _ConfigRule | None = None
        self.lists_on_command_line: set[str] = set()
        self._common: set[str] = set()
        super().__init__(description=description, formatter_class=FlagHelp, allow_abbrev=False, add_help=False)
        self.add_argument(
            "-h",
            "--help",
            action=_ShowHelp,
            help="Show the flags and exit; `all` adds those that few people need.",
        )
        for kind in kinds:
            self.add_settings(kind)

    def add_argument(self, *names: str, common: bool = False, **options: Any) -> argparse.Action:
        """Add a flag or a positional argument; a `common` flag is one that the short help shows.

        Numbers of type `float` must be finite; of settings, [`build`][hf_bucketing.settings.build] checks that.
        """
        if options.get("type") is float:
            options["type"] = _finite_number
        action = super().add_argument(*names, **options)
        if common:
            self._common.add(action.dest)
        return action

    @property
    def common(self) -> list[argparse.Action]:
        """What most people need: the arguments that are required, and the common ones."""
        return [action for action in self._actions if action.required or action.dest in self._common]

    def add_settings(
        self, kind: type, *, skip: Sequence[str] = (), several: Sequence[str] = (), listed: bool = False
    ) -> None:
        """Add a flag for each setting of a configuration; [`from_flags`] builds the configuration from them.

        Name, type and default are those of the dataclass field, and the help is the field's entry under `Args:` in
        the docstring. A field may have `metadata`: `argument`, another name that the library uses for the same
        setting, `parse`, a function that reads the flag's value, `flag`, which says that it has none, and `common`,
        which makes the short help show it.

        Args:
            kind (type): Frozen dataclass, which may be composed of others.
            skip (sequence of `str`): Settings that get no flag.
            several (sequence of `str`): Settings whose flag takes one or several values, of as many configurations;
                these are None without the flag.
            listed (`bool`): Whether settings are added that only a list of configurations in a file has.
        """
        groups: dict[type, Any] = {}
        required_first = sorted(settings_in(kind), key=lambda setting: setting.default is not dataclasses.MISSING)
        for setting in required_first:
            flag = setting.metadata.get("flag", True)
            if setting.name in skip or flag is False or (flag == "listed" and not listed):
                continue
            if setting.owner not in groups:
                title = (inspect.getdoc(setting.owner) or setting.owner.__name__).partition("\n")[0].rstrip(".")
                title = without_links(title).replace("`", "")
                groups[setting.owner] = self.add_argument_group(title)
            options = _options(setting)
            if setting.name in several:
                options |= {"nargs": "+", "action": _Several, "required": False, "default": None}
            groups[setting.owner].add_argument(f"--{setting.name}", **options)
            if setting.metadata.get("common"):
                self._common.add(setting.name)
            if "argument" in setting.metadata:
                self._arguments[setting.metadata["argument"]] = f"--{setting.name}"

    def name_conflicts(self, others: Mapping[str, Sequence[str]]) -> None:
        """Add to the help of each setting the others whose values may exclude its own.

        Args:
            others (mapping of `str` to names): For each setting, the names of the others.
        """
        for action in self._actions:
            if action.dest in others:
                action.help = f"{action.help} It may conflict with {quoted(others[action.dest])}."

    def add_config(
        self,
        script: str,
        *,
        others: Callable[[], Mapping[str, Collection[str]]],
        names: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Add `--config`, a YAML file that holds settings of this and other scripts; flags override it.

        A setting has the name of its flag. Under a script's name, a file may hold settings that this script alone is
        to take, in place of those at its top. Paths begin at the working directory, or else at the file's folder; one
        that exists in both is refused. Its list of `sources` is not read here. The parsed `config` is the
        [`ConfigFile`], or None.

        Args:
            script (`str`): Name of this script.
            others (callable): Function that returns the names of all settings of each script.
            names (mapping of `str` to names, *optional*): Names that a flag has in files, instead of its own: the
                first one that is given counts.
        """
        self._config = _ConfigRule(script, others, names)
        self.add_argument(
            "--config",
            metavar="FILE",
            common=True,
            help="YAML config file, as flags are named; flags override it.",
        )

    @property
    def section(self) -> tuple[str, frozenset[str]] | None:
        """The name under which a file holds settings of this script alone, and theirs; None if it takes no file."""
        if self._config is None:
            return None
        names = {action.dest for action in self._actions} - {"help", "config"}
        return self._config.script, frozenset(names)

    @property
    def flags(self) -> dict[str, str]:
        """The flag of each argument of the library."""
        options = [option for option in self._option_string_actions if option.startswith("--")]
        return {**{option[2:]: option for option in options}, **self._arguments}

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse the command line.

        Raises:
            FlagError: On a missing flag, a wrong value, or an unknown flag; the message names the nearest flag, or the
                new name of a renamed one.
        """
        self.lists_on_command_line.clear()
        arguments = [str(word) for word in (sys.argv[1:] if args is None else args)]
        words = arguments[: arguments.index("--")] if "--" in arguments else arguments
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        unknown = [flag for flag in flags if flag not in self._option_string_actions]
        if unknown:
            self.error("; ".join(map(self._did_you_mean, unknown)))
        if self._config is None or "--config" not in flags:
            parsed: argparse.Namespace = super().parse_args(arguments, namespace)
            return parsed
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        finder.add_argument("--config", nargs="?")
        path = finder.parse_known_args(words)[0].config
        if path is None:
            self.error("--config needs a file")
        file = read_config_file(path, find_paths=True)
        values = self._values_in(file, self._config)
        for action in self._actions:
            action.required = action.required and action.dest not in values
        parsed = super().parse_args(arguments, argparse.Namespace(**values))
        parsed.config = file
        return parsed

    def read_settings(self, file: ConfigFile, entries: Mapping[str, Entry]) -> dict[str, Any]:
        """Return settings of a file by name, each with the type of its flag; None stands for a default of None.

        Raises:
            FlagError: If there is no flag of a name, or a value is not of its type; the message names the line.
        """
        actions = {action.dest: action for action in self._actions}
        for name, entry in entries.items():
            if name not in actions:
                raise FlagError(f"{file.where(entry)}: {_no_setting(name, actions)}")
        return {name: _value_of(actions[name], entry, file) for name, entry in entries.items()}

    def _values_in(self, file: ConfigFile, rule: _ConfigRule) -> dict[str, Any]:
        """Return what a file says about the flags of this parser."""
        section = self._section_of(file, rule)
        values = {}
        for action in self._actions:
            if action.dest in ("help", "config"):
                continue
            top = [file.entries[name] for name in rule.names.get(action.dest, (action.dest,)) if name in file.entries]
            with_values = [entry for entry in top if entry.value is not None] or top
            entry = section.get(action.dest) or (with_values[0] if with_values else None)
            if entry is None or (entry.value is None and action.default is None):
                continue
            try:
                values[action.dest] = _value_of(action, entry, file)
            except FlagError as error:
                scripts = [script for script, names in rule.others().items() if action.dest in names]
                if action.dest in section or len(scripts) < 2:
                    raise
                hint = f"What only this script is to take stands below {rule.script}:"
                raise FlagError(f"{error} {hint} {', '.join(scripts)} have a setting of this name.") from error
        return values

    def _section_of(self, file: ConfigFile, rule: _ConfigRule) -> Mapping[str, Entry]:
        """Return the settings that are this script's alone, after a check of all names in the file.

        Raises:
            FlagError: If no script has a setting of a name.
        """
        known = {SOURCES, CACHED_DIR, *(name for names in rule.names.values() for name in names)}
        known |= {action.dest for action in self._actions if action.dest not in ("help", "config", *rule.names)}
        scripts = rule.others() if file.entries.keys() - known else {}
        known = known.union(*scripts.values())
        for name, entry in file.entries.items():
            if name not in scripts and name not in known and not _is_void(name, entry):
                raise FlagError(f"{file.where(entry)}: {_no_setting(name, {*known, *scripts})}")
            if name in scripts and not isinstance(entry.value, dict):
                raise FlagError(f"{file.where(entry)}: {name} must hold settings of that script, `name: value`.")
            for inner, setting in entry.value.items() if name in scripts else ():
                if inner not in scripts[name] and not _is_void(inner, setting):
                    raise FlagError(f"{file.where(setting)}: {_no_setting(inner, scripts[name])}")
        section: Mapping[str, Entry] = file.entries[rule.script].value if rule.script in file.entries else {}
        return section

    def error(self, message: str) -> NoReturn:
        """Raise the message as an error.

        Raises:
            FlagError: Always.
        """
        raise FlagError(f"{message} ({self.prog} --help all lists all flags)")

    def _get_formatter(self) -> argparse.HelpFormatter:
        formatter = super()._get_formatter()
        assert isinstance(formatter, FlagHelp)
        formatter.flags = self.flags
        return formatter

    def _did_you_mean(self, flag: str) -> str:
        """Return why a flag is refused, with the flag to use instead if there is one."""
        known = [option for option in self._option_string_actions if option.startswith("--")]
        hint = did_you_mean("--" + flag[2:].replace("-", "_"), known)
        return f"there is no flag {flag}{hint.removesuffix('.')}"


def from_flags(kind: type[Config], args: argparse.Namespace, **others: Any) -> Config:
    """Build a configuration from parsed flags, and from `others`, the settings that have no flag of their name.

    Raises:
        BucketingError: If the configuration refuses a value.
    """
    values = {**vars(args), **others}
    return build(kind, {name: values[name] for name in names_of(kind) if name in values})


def _options(setting: Setting) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a setting."""
    options: dict[str, Any] = {"help": setting.help.replace("%", "%%")}
    if setting.default is dataclasses.MISSING:
        options["required"] = True
    else:
        options["default"] = setting.default
    if "parse" in setting.metadata:
        alone = {"nargs": "?", "const": True} if bool in parts_of(setting.hint) else {}
        return {**options, **alone, "type": setting.metadata["parse"]}
    if (listed := choices(setting.hint)) is not None:
        return {**options, "choices": listed}
    hint, *literals = sorted(parts_of(setting.hint), key=lambda part: get_origin(part) is Literal)
    if literals:
        return {**options, "type": _or_one_of(hint, [value for part in literals for value in get_args(part)])}
    if hint is bool:
        return {**options, "nargs": "?", "const": True, "type": _boolean, "metavar": "true|false"}
    if get_origin(hint) is list:
        return {**options, "nargs": "+", "action": _Several, "type": get_args(hint)[0]}
    return {**options, "type": hint}


def _no_setting(name: str, known: Collection[str]) -> str:
    """Return why a name in a file is refused, with the name to use instead if there is one."""
    if name in _REMOVED:
        return f"there is no setting {name} any more: {_REMOVED[name]}. Omit it."
    return f"there is no setting {name}{did_you_mean(name.replace('-', '_'), known)}"


def _is_void(name: str, entry: Entry) -> bool:
    """Return whether an entry is a removed setting without a value, as config.yaml of earlier runs names it."""
    return name in _REMOVED and entry.value is None


def _value_of(action: argparse.Action, entry: Entry, file: ConfigFile) -> Any:
    """Return a value of a file as the value of a flag, in the type that the flag has on the command line."""

    def wrong(what: str) -> FlagError:
        return FlagError(f"{file.where(entry)}: {action.dest} {what}.")

    def convert(text: Any) -> Any:
        kind: Any = _boolean if action.nargs == 0 else action.type or str
        if not isinstance(text, str):
            raise wrong("must be a value, or a list of values" if action.nargs == "+" else "must be a value")
        try:
            value = kind(text)
        except (BucketingError, argparse.ArgumentTypeError) as error:
            raise wrong(f"is not valid: {error}".rstrip(".")) from error
        except (TypeError, ValueError) as error:
            raise wrong(f"must be of type {getattr(kind, '__name__', kind)}, got {text!r}") from error
        if action.choices is not None and value not in action.choices:
            raise wrong(f"must be one of {', '.join(map(str, action.choices))}, got {text!r}")
        return value

    value = entry.value
    if value is None:
        if action.default is not None or action.required:
            raise wrong("has no value; write one, or remove the line")
        return None
    if action.nargs == "+":
        values = [convert(item) for item in (value if isinstance(value, list) else [value])]
        if not values:
            raise wrong("is an empty list; write a value, or remove the line")
        return values
    if isinstance(value, list) and action.type not in (None, str, int, float, _finite_number, Path):
        value = _as_one_text(value)  # of a flag that reads lists, such as 1,17,49
    if isinstance(value, list):
        raise wrong("takes one value, not a list")
    return convert(value)


def _as_one_text(values: list[Any]) -> Any:
    """Return numbers as `1,17,49`, and sizes as `480,832;720,1280`; other values as they are."""
    if values and all(isinstance(value, str) for value in values):
        return ",".join(values)
    parts = [_as_one_text(value) if isinstance(value, list) else value for value in values]
    return ";".join(parts) if parts and all(isinstance(part, str) for part in parts) else values


def _or_one_of(kind: Callable[[str], Any], words: Sequence[str]) -> Callable[[str], Any]:
    """Return a function that reads a value of some type, or one of some words."""

    def read(text: str) -> Any:
        try:
            return text if text in words else kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected {getattr(kind, '__name__', kind)} or {' or '.join(words)}, got {text!r}"
            ) from None

    return read


def _finite_number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r}")
    return number


_finite_number.__name__ = "float"  # as messages name its type


def numbers(text: str) -> list[int]:
    """Parse the value of a flag such as `1,17,49`."""
    return [int(part) for part in text.split(",")]


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() in ("true", "yes", "1")
