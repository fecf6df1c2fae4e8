"""README.md and the pages under docs/, taken apart: blocks of code, code within text, tables and prose."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_bucketing.commands import launch
from hf_bucketing.commands.table import COMMANDS
from tests.conftest import ROOT, run_command_here, run_script_here

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
MARKED = re.compile(r"<!-- (?:figure|table): [^>]* -->.*?<!-- end -->", re.DOTALL)


@dataclass(frozen=True)
class Page:
    """One page of the documentation, named by its path in the repository."""

    name: str
    whole: str

    def blocks(self, language: str) -> list[str]:
        """Return the blocks of code in a language."""
        return [match[3] for match in FENCE.finditer(self.whole) if match[2] == language]

    @cached_property
    def text(self) -> str:
        """The page without blocks of code."""
        return FENCE.sub("", self.whole)

    @property
    def spans(self) -> list[str]:
        """The code within the text."""
        return spans(self.text)

    @property
    def prose(self) -> str:
        """The text without code and without the figures that update_docs.py writes, on one line."""
        without = re.sub(r"`[^`]*`|<!--.*?-->", "", MARKED.sub("", self.text), flags=re.DOTALL)
        return " ".join(re.sub(r"\]\([^)]*\)", "]", without).split())

    def table(self, heading: str) -> list[str]:
        """Return the rows of the table under a heading."""
        section = self.whole.split(f"\n{heading}\n")[1].split("\n#")[0]
        rows = [line for line in section.splitlines() if line.startswith("|")]
        assert len(rows) > 2, heading
        return rows[2:]

    def under(self, heading: str) -> Page:
        """Return what stands under a heading, up to the next one."""
        return Page(self.name, re.split(r"^#+ ", self.whole.split(f"\n{heading}\n")[1], maxsplit=1, flags=re.M)[0])

    def commands(self) -> list[str]:
        """Return every command of the bash blocks, each on one line."""
        lines = [line for block in self.blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
        return [" ".join(line.split()) for line in lines if line.strip()]

    def calls(self) -> list[tuple[str, list[str]]]:
        """Return every call with arguments of a command in bash blocks, and of a script also in the text.

        A command is named without `hf_bucketing` and what launches it, a script by its path in scripts/.
        """
        lines = self.commands()
        lines += [span for span in self.spans if re.search(r"scripts/[\w/]+\.py [^…]", span)]
        return [call for line in lines if (call := call_of(shlex.split(line, comments=True))) is not None]


def call_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the command or script that a line calls, and its arguments; None if it calls neither.

    Raises:
        FlagError: If accelerate does not know what launches it.
    """
    for place, word in enumerate(words):
        if word.startswith("scripts/") and word.endswith(".py"):
            return word.removeprefix("scripts/"), words[place + 1 :]
    if words[:1] != ["hf_bucketing"]:
        return None
    if words[1:2] == ["launch"]:
        launched = launch.make_parser().parse_args(words[2:])  # which knows the flags of accelerate launch
        return launched.command, launched.words
    lengths = [length for length in (2, 1) if " ".join(words[1 : 1 + length]) in COMMANDS]
    assert lengths, f"no command: {words}"
    return " ".join(words[1 : 1 + lengths[0]]), words[1 + lengths[0] :]


def run_call(name: str, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, or a script of scripts/, in this process."""
    if name.endswith(".py"):
        return run_script_here(name, *args, **options)
    return run_command_here(*name.split(), *args, **options)


def spans(text: str) -> list[str]:
    """Return the code in a text, without line breaks."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def _pages() -> Iterator[Page]:
    """Yield README.md and the pages whose text is in docs/, not those that are links to files elsewhere."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if not path.is_symlink():
            yield Page(str(path.relative_to(ROOT)), path.read_text())


PAGES = {page.name: page for page in _pages()}


def folder_of(page: Page) -> Path:
    return (ROOT / page.name).parent
