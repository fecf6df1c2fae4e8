"""Pages of HTML: sections of charts, tables, facts and pictures in one file, and rows in scripts beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from ..marks import MARKS
from .charts import COLOURS, Chart

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraphs:
    """Paragraphs of text; `warning` sets them off."""

    kind: ClassVar[str] = "paragraphs"
    texts: Sequence[str]
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a page comes to, in a sentence or two, and the rule behind it, if that is not said elsewhere."""

    kind: ClassVar[str] = "verdict"
    text: str
    rule: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Numbers and names with what they are, the most important ones of a section, under a title if there is one."""

    kind: ClassVar[str] = "facts"
    facts: Sequence[tuple[str, str]]
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """Charts side by side where there is room."""

    kind: ClassVar[str] = "charts"
    charts: Sequence[Chart]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table that readers can sort by a click on a column's head.

    Attributes:
        title (`str`): Its title.
        head (sequence of `str`): Titles of the columns.
        rows (sequence of sequences of `str`): Cells, the first of each row being its title.
        texts (sequence of `int`): Columns of text beside the first; all others are numbers.
        note (`str`): What the columns mean.
        folded (`bool`): Whether it is shown only when it is opened.
    """

    kind: ClassVar[str] = "table"
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[int] = ()
    note: str = ""
    folded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture in a gallery.

    Attributes:
        source (`str`): Its data as a URI.
        width (`int`): Width in pixels.
        height (`int`): Height in pixels.
        alt (`str`): What it shows.
        name (`str`): Its title.
        lines (sequence of `str`): What is said below.
        box (`tuple` of `float`, *optional*): Left, top, width and height of a region that is marked, as shares.
    """

    source: str
    width: int
    height: int
    alt: str
    name: str
    lines: Sequence[str] = ()
    box: tuple[float, float, float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gallery:
    """Pictures under a title; a `strip` has them in one row, which scrolls."""

    kind: ClassVar[str] = "gallery"
    title: str
    pictures: Sequence[Picture]
    strip: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowList:
    """Rows that readers filter, search and leaf through; scripts beside the page hold them.

    Attributes:
        scripts (sequence of `str`): Relative URLs of scripts, each of which calls `rows.push` with rows as objects.
        pictures (`str`): Relative URL of the folder of their pictures.
        filters (mapping of `str` to sequence of `str`): Values to filter by, under the rows' names of them.
    """

    kind: ClassVar[str] = "rows"
    scripts: Sequence[str]
    pictures: str
    filters: Mapping[str, Sequence[str]]


Block = Paragraphs | Verdict | Facts | Charts | Table | Gallery | RowList


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of a page: its name in links, its title, and what it holds; one without blocks is not shown."""

    name: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page: its title, what it is about, what stands above all sections, and these.

    A browser reads it anew after `refresh` seconds, if they are given.
    """

    title: str
    subtitle: str
    sections: Sequence[Section]
    head: Sequence[Block] = ()
    refresh: int | None = None


def render_page(page: Page) -> str:
    """Return the page as HTML that asks nothing of any server; all texts are escaped."""
    return _template().render(page=page)


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("hf_bucketing.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["flags"] = _with_flags
    environment.filters["mark"] = _marked
    return environment.get_template("page.html", globals={"colours": COLOURS})


def _with_flags(text: str) -> Markup:
    """Escape a text, and keep its flags, such as --max_upscale, in one piece."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"--[a-z_]+", r"<code>\g<0></code>", str(escape(text))))


def _marked(text: str) -> Markup:
    """Escape a text as [`_with_flags`], and colour a word that says how a check, a plan or a run came out."""
    from markupsafe import Markup

    written = _with_flags(text)
    return Markup('<span class="mark {}">{}</span>').format(MARKS[text], written) if text in MARKS else written
