"""The flags of the scripts, written from the parsers themselves.

A line `<!-- flags: NAME -->` of a page becomes the heading, the description and the flags of `scripts/NAME.py`; a
pattern such as `benchmark_*` means all scripts of such names that the page does not name before.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

MARKER = re.compile(r"<!-- flags: (\S+) -->")
COMMAND = re.compile(r"(?:python|accelerate launch) ")
TYPES = {None: "text", str: "text", int: "int", float: "float", Path: "path"}
FLAG = re.compile(r"(?<![\w-])--[a-z]\w*")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the markers of a page."""
    folder = Path(config.config_file_path).parent / "scripts"
    written: set[str] = set()

    def write(match: re.Match[str]) -> str:
        names = sorted(path.stem for path in folder.glob(f"{match[1]}.py"))
        names = [name for name in names if name not in written]
        written.update(names)
        return "\n\n".join(section for name in names if (section := describe(folder, name)))

    return MARKER.sub(write, markdown)


def describe(folder: Path, name: str) -> str:
    """Return a section about a script, or nothing about a module that is not one."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    module = importlib.import_module(name)
    if not hasattr(module, "make_parser"):
        return ""
    parser = module.make_parser()
    parser.prog = f"{name}.py"
    parts = [f"### {name}.py"]
    for paragraph in (parser.description or "").strip().split("\n\n"):
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
