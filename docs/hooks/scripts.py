"""The flags of commands and scripts, written from the parsers themselves.

A line `<!-- flags: NAME -->` of a page becomes the heading, the description and the flags of a command, or of
`scripts/NAME.py`; a pattern such as `benchmarks/benchmark_*` means all scripts of such names that are no commands.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from hf_bucketing.commands.table import COMMANDS

MARKER = re.compile(r"<!-- flags: (.+) -->")
COMMAND = re.compile(r"(?:python|accelerate launch|hf_bucketing) ")
TYPES = {None: "text", str: "text", int: "int", float: "float", Path: "path"}
FLAG = re.compile(r"(?<![\w-])--[a-z]\w*")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the markers of a page."""
    folder = Path(config.config_file_path).parent / "scripts"

    def write(match: re.Match[str]) -> str:
        if match[1] in COMMANDS:
            return describe(f"hf_bucketing {match[1]}", COMMANDS[match[1]].load())
        modules = {path: script(path) for path in sorted(folder.glob(f"{match[1]}.py"))}
        return "\n\n".join(
            describe(f"python scripts/{path.relative_to(folder).as_posix()}", module)
            for path, module in modules.items()
            if hasattr(module, "main") and module.main.__module__ == module.__name__  # no command, and with flags
        )

    return MARKER.sub(write, markdown)


def script(path: Path) -> ModuleType:
    """Import a script."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)


def describe(program: str, module: ModuleType) -> str:
    """Return a section about a command or a script."""
    parser = module.make_parser()
    parser.prog = program
    parts = [f"### {program.removeprefix('python scripts/')}"]
    description = (parser.description or "").replace("%(prog)s", program)
    for paragraph in description.strip().split("\n\n"):
        parts.append(f"```bash\n{paragraph}\n```" if COMMAND.match(paragraph) else code_flags(paragraph))
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        entries = [entry(action, formatter) for action in group._group_actions if action.dest != "help"]
        if entries:
            title = {"options": "Options", "positional arguments": "Arguments"}.get(group.title, group.title)
            parts += [f"**{title}**", *entries]
    return "\n\n".join(parts)


def entry(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """Return a flag and its help as an entry of a definition list."""
    name = action.option_strings[0] if action.option_strings else action.metavar or action.dest
    if action.choices is not None:
        values = "|".join(map(str, action.choices))
    elif action.nargs == 0:
        values = ""
    else:
        values = action.metavar or TYPES.get(action.type, "value")
    several = " …" if action.nargs in ("+", "*") else ""
    shown = f"{name} {values}{several}".rstrip() if action.option_strings else name + several
    required = " **Required.**" if action.required and action.option_strings else ""
    return f"`{shown}`\n:   {code_flags(formatter._expand_help(action))}{required}"


def code_flags(text: str) -> str:
    """Return plain text as Markdown, with its flags as code."""
    return FLAG.sub(r"`\g<0>`", re.sub(r"[*<\[\]]", r"\\\g<0>", " ".join(text.split())))
