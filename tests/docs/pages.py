"""README.md and the pages under docs/, taken apart: blocks of code, code within text, tables and prose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.conftest import ROOT

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

    def script_calls(self) -> list[tuple[str, list[str]]]:
        """Return every call of a script with arguments: in bash blocks, and in the text."""
        lines = self.commands()
        lines += [span for span in self.spans if re.search(r"scripts/\w+\.py ", span)]
        calls = [re.search(r"scripts/(\w+\.py) (.*)", line) for line in lines]
        return [(call[1], shlex.split(call[2], comments=True)) for call in calls if call]


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
