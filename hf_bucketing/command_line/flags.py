"""The parser of all scripts: flags from dataclasses, with their docstrings as help and "did you mean"."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from ..errors import BucketingError, FlagError
from ..settings import RENAMED, Setting, build, choices, names_of, parts_of, settings_in, without_links

Config = TypeVar("Config")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Add the default of each flag to its help, unless the help says what happens without the flag."""

    flags: dict[str, str]

    def _get_help_string(self, action: argparse.Action) -> str:
        text = BucketingError(action.help or "").in_flags(self.flags).replace("`", "")
        if action.required or not action.option_strings or "default" in text.lower():
            return text
        if action.default is argparse.SUPPRESS:
            return text
        return f"{text} (default: {_shown(action.default)})".lstrip()


def _shown(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return "true" if default else "false"
    if isinstance(default, float):
        return f"{default:g}"
    text = ",".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
    return text.replace("%", "%%")


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
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False)
        for kind in kinds:
            self.add_settings(kind)

    def add_settings(self, kind: type, *, skip: Sequence[str] = ()) -> None:
        """Add a flag for each setting of a configuration; [`from_flags`] builds the configuration from them.

        Name, type and default are those of the dataclass field, and the help is the field's entry under `Args:` in
        the docstring. A field may have `metadata`: `argument`, another name that the library uses for the same
        setting, and `parse`, a function that reads the flag's value.

        Args:
            kind (type): Frozen dataclass, which may be composed of others.
            skip (sequence of `str`): Settings that get no flag.
        """
        groups: dict[type, Any] = {}
        for setting in settings_in(kind):
            if setting.name in skip:
                continue
            if setting.owner not in groups:
                title = (inspect.getdoc(setting.owner) or setting.owner.__name__).partition("\n")[0].rstrip(".")
                title = without_links(title).replace("`", "")
                groups[setting.owner] = self.add_argument_group(title)
            groups[setting.owner].add_argument(f"--{setting.name}", **_options(setting))
            if "argument" in setting.metadata:
                self._arguments[setting.metadata["argument"]] = f"--{setting.name}"

    @property
    def flags(self) -> dict[str, str]:
        """The flag of each argument of the library."""
        options = [option for option in self._option_string_actions if option.startswith("--")]
        old = {name: f"--{new}" for name, new in RENAMED.items() if f"--{new}" in options}
        return {**old, **{option[2:]: option for option in options}, **self._arguments}

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse the command line.

        Raises:
            FlagError: On a missing flag, a wrong value, or an unknown flag; the message names the nearest flag, or the
                new name of a renamed one.
        """
        given = [str(word) for word in (sys.argv[1:] if args is None else args)]
        words = given[: given.index("--")] if "--" in given else given
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        unknown = [flag for flag in flags if flag not in self._option_string_actions]
        if unknown:
            self.error("; ".join(map(self._did_you_mean, unknown)))
        parsed: argparse.Namespace = super().parse_args(given, namespace)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise the message as an error.

        Raises:
            FlagError: Always.
        """
        raise FlagError(f"{message} (python scripts/{self.prog} --help lists all flags)")

    def _get_formatter(self) -> argparse.HelpFormatter:
        formatter = super()._get_formatter()
        assert isinstance(formatter, _Help)
        formatter.flags = self.flags
        return formatter

    def _did_you_mean(self, flag: str) -> str:
        """Return why a flag is refused, with the flag to use instead if there is one."""
        name, _, value = RENAMED.get(flag[2:], "").partition("=")
        if f"--{name}" in self._option_string_actions:
            return f"there is no flag {flag} any more; use --{name} {value.lower()}".rstrip()
        known = [option for option in self._option_string_actions if option.startswith("--")]
        near = difflib.get_close_matches(flag.replace("-", "_"), [option.replace("-", "_") for option in known], 1)
        hint = f"; did you mean --{near[0][2:]}?" if near else ""
        return f"there is no flag {flag}{hint}"


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
        return {**options, "type": setting.metadata["parse"]}
    if (listed := choices(setting.hint)) is not None:
        return {**options, "choices": listed}
    hint, *literals = sorted(parts_of(setting.hint), key=lambda part: get_origin(part) is Literal)
    if literals:
        return {**options, "type": _or_one_of(hint, [value for part in literals for value in get_args(part)])}
    if hint is bool:
        return {**options, "nargs": "?", "const": True, "type": _boolean, "metavar": "true|false"}
    if get_origin(hint) is list:
        return {**options, "nargs": "+", "type": get_args(hint)[0]}
    return {**options, "type": hint}


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


def numbers(text: str) -> list[int]:
    """Parse the value of a flag such as `1,17,49`."""
    return [int(part) for part in text.split(",")]


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() in ("true", "yes", "1")
