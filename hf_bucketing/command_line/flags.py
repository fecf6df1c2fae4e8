"""The parser of all scripts: flags of functions and dataclasses, with defaults in the help and "did you mean"."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import types
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from ..errors import FlagError


class _Help(argparse.RawDescriptionHelpFormatter):
    """Says the default of each flag that has one, or says in its own words what happens without it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.required or not action.option_strings or "default" in text or action.default is argparse.SUPPRESS:
            return text
        return f"{text} (default: {_shown(action.default)})".replace("%", "%%").lstrip()


def _shown(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, float):
        return f"{default:g}"
    return ",".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)


class FlagParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` as all scripts use it.

    Flags are written in one way, with underscores and in full. Errors are [`FlagError`]s of one line, which
    [`run_script`][hf_bucketing.command_line.script.run_script] prints.

    Args:
        description (`str`, *optional*): Usually the script's `__doc__`.
        kinds (dataclass types): Their fields become flags: the name, type and default of a field, `help` of its
            metadata, and `argument` if the library calls the setting by another name.
    """

    def __init__(self, description: str | None, *kinds: type) -> None:
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False)
        self._arguments: dict[str, str] = {}
        for kind in kinds:
            hints = get_type_hints(kind)
            for field in dataclasses.fields(kind):
                self._add_field(field, hints[field.name])

    def add_argument(self, *names: str, argument: str | None = None, **options: Any) -> argparse.Action:
        """Add a flag; `argument` is what the library calls the setting, if that is another name."""
        if argument is not None:
            self._arguments[argument] = names[0]
        return super().add_argument(*names, **options)

    @property
    def flags(self) -> dict[str, str]:
        """The flag of each argument of the library."""
        options = [option for option in self._option_string_actions if option.startswith("--")]
        return {**{option[2:]: option for option in options}, **self._arguments}

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse the command line; a flag that is not known is an error that names the nearest one.

        Raises:
            FlagError: On unknown, missing or wrong flags.
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

    def _did_you_mean(self, flag: str) -> str:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        near = difflib.get_close_matches(flag.replace("-", "_"), [option.replace("-", "_") for option in known], 1)
        hint = f"; did you mean --{near[0][2:]}?" if near else ""
        return f"there is no flag {flag}{hint}"

    def _add_field(self, field: dataclasses.Field[Any], hint: Any) -> None:
        options: dict[str, Any] = {"help": field.metadata.get("help"), "argument": field.metadata.get("argument")}
        if field.default is not dataclasses.MISSING:
            options["default"] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            options["default"] = field.default_factory()
        else:
            options["required"] = True
        if get_origin(hint) in (Union, types.UnionType):
            (hint,) = (part for part in get_args(hint) if part is not type(None))
        if get_origin(hint) is list:
            (hint,) = get_args(hint)
            options["nargs"] = "+"
        if hint is bool:
            options |= {"nargs": "?", "const": True, "type": _boolean, "metavar": "true|false"}
        elif get_origin(hint) is Literal:
            options["choices"] = get_args(hint)
        else:
            options["type"] = hint
        self.add_argument(f"--{field.name}", **options)


def numbers(text: str) -> list[int]:
    """Parse the value of a flag such as `1,17,49`."""
    return [int(part) for part in text.split(",")]


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() in ("true", "yes", "1")
