"""What `--help` prints: the flags that most people need, or with `--help all` every flag in its group."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ..errors import BucketingError

MOST_FLAGS = 25
"""Flags of a script that `--help` prints; of a script with more, only the common ones."""


class FlagHelp(argparse.RawDescriptionHelpFormatter):
    """Add the default of each flag to its help, unless the help says what happens without the flag."""

    flags: dict[str, str]

    def _get_help_string(self, action: argparse.Action) -> str:
        text = BucketingError(action.help or "").in_flags(self.flags).replace("`", "")
        if action.required or not action.option_strings or "default" in text.lower():
            return text
        if action.default is argparse.SUPPRESS:
            return text
        return f"{text} (default: {_formatted(action.default)})".lstrip()


def short_help(parser: argparse.ArgumentParser, common: Sequence[argparse.Action]) -> str:
    """Return the help of a script, or of one with more than [`MOST_FLAGS`] flags that of its common ones."""
    count = len(parser._actions) - 1  # all but --help
    if count <= MOST_FLAGS:
        return parser.format_help()
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, common, [])
    formatter.add_text(parser.description)
    formatter.start_section("what most people need")
    formatter.add_arguments(common)
    formatter.end_section()
    formatter.add_text(f"--help all prints all {count} settings in groups.")
    return formatter.format_help()


def _formatted(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return "true" if default else "false"
    if isinstance(default, float):
        return f"{default:g}"
    text = ",".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
    return text.replace("%", "%%")
