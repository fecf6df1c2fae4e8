"""The documentation site: its links, its pages in a browser at two widths, its copy buttons and its search."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

import nbformat
import pytest

import hf_bucketing
from tests.browser import look_at
from tests.conftest import ROOT, made_once, run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
PACKAGES = sorted((ROOT / "hf_bucketing").rglob("__init__.py"))


def public_names(package: Path) -> list[str]:
    """Return the names that a package exports."""
    name = ".".join(package.parent.relative_to(ROOT).parts)
    return [*getattr(importlib.import_module(name), "__all__", ())]


def test_every_public_name_is_on_one_page_of_the_api() -> None:
    families = ROOT / "hf_bucketing" / "models"
    public = {name for package in PACKAGES if package.parent.parent != families for name in public_names(package)}
    written = [path.rpartition(".")[2] for page in PAGES
               for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]  # fmt: skip
    assert len(public) > 100
    assert public - set(written) == set()
    assert [name for name, times in Counter(written).items() if times > 1] == []


class Links(HTMLParser):
    """Ids, links, and what a page loads, of one HTML file."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.ids.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag != "a" and tag != "form":
            self.loaded += [values[name] for name in ("href", "src") if name in values]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
        run(command, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})

    return made_once(tmp_path_factory, "site", build)


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """The address of a server of the site."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def pages_of(site: Path) -> list[str]:
    """Return the addresses of all pages below the site's."""
    return [path.relative_to(site).as_posix().removesuffix("index.html") for path in sorted(site.rglob("*.html"))]


@pytest.mark.slow
def test_every_link_and_anchor_of_the_site_resolves(site: Path) -> None:
    pages = {f"/{page}": Links((site / page / "index.html" if page.endswith("/") or not page else site / page)
             .read_text()) for page in pages_of(site)}  # fmt: skip
    assert len(pages) > 40
    broken = []
    for page, parsed in pages.items():
        for link in [*parsed.links, *parsed.loaded]:
            target = urlsplit(urljoin(page, link))
            if target.scheme in ("data", "mailto") or (target.netloc and link in parsed.links):
                continue
            file = site / unquote(target.path).lstrip("/")
            anchor = unquote(target.fragment)
            known = target.path in pages
            if (
                target.netloc
                or not (known or file.is_file())
                or (known and anchor and anchor not in pages[target.path].ids)
            ):
                broken.append(f"{page}: {link}")
    assert not broken


@pytest.mark.every
@pytest.mark.slow
def test_every_page_is_whole_in_a_browser(site: Path, address: str, browser: Browser) -> None:
    context, faults = browser.new_context(), {}  # of one cache: scripts and fonts are loaded once
    for page in pages_of(site):
        errors, requests, images, overflow = look_at(context, address + page)
        elsewhere = [request for request in requests if not request.startswith(address)]
        if found := [*errors, *elsewhere, *images, *overflow]:
            faults[page] = found
    context.close()
    assert not faults


@pytest.fixture
def page(address: str, browser: Browser) -> Iterator[Page]:
    """A page of a browser that may read the clipboard."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    yield context.new_page()
    context.close()


def copies_of(page: Page, address: str) -> list[str]:
    """Return what each copy button of a page puts on the clipboard."""
    page.goto(address)
    page.wait_for_selector("button[data-md-type=copy]", state="attached")
    texts = []
    for button in page.locator("button[data-md-type=copy]").all():
        page.evaluate("navigator.clipboard.writeText('')")
        button.evaluate("button => button.click()")
        page.wait_for_function("async () => await navigator.clipboard.readText() != ''")
        texts.append(page.evaluate("navigator.clipboard.readText()"))
    return texts


def fences_of(markdown: str, *languages: str) -> list[str]:
    fences = re.finditer(
        rf"^( *)```(?:{'|'.join(languages)})\b[^\n]*\n(.*?)\n\1```$", markdown, re.DOTALL | re.MULTILINE
    )
    return [textwrap.dedent(fence[2]) for fence in fences]


@pytest.mark.slow
def test_the_tables_of_memory_are_whole_on_a_laptop(address: str, browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}memory/")
    widths = page.eval_on_selector_all(
        ".md-typeset__scrollwrap", "all => all.map(one => [one.scrollWidth, one.clientWidth])"
    )
    page.close()
    assert len(widths) > 3
    assert all(needed <= width for needed, width in widths)


@pytest.mark.every
@pytest.mark.slow
def test_copy_buttons_copy_the_code_alone(address: str, page: Page) -> None:
    copied = copies_of(page, f"{address}getting-started/")
    fences = fences_of((ROOT / "docs" / "getting-started.md").read_text(), "python", "bash", "yaml", "diff")
    assert fences
    assert set(fences) <= set(copied)

    notebook = nbformat.read(ROOT / "notebooks" / "01_buckets.ipynb", as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    shell = [
        code for cell in notebook.cells for code in fences_of(cell.source, "bash") if cell.cell_type == "markdown"
    ]
    assert sorted(copies_of(page, f"{address}notebooks/01_buckets/")) == sorted([*cells, *shell]), "no output"

    example = inspect.getdoc(hf_bucketing.LatentSpec).partition("Example:\n")[2]
    typed = [line.strip()[4:] for line in example.splitlines() if line.strip().startswith((">>> ", "... "))]
    assert "\n".join(typed) in copies_of(page, f"{address}api/buckets/"), "neither prompts nor output"


@pytest.mark.slow
def test_search_finds_a_name(address: str, page: Page) -> None:
    page.goto(address)
    page.locator(".md-search__input").fill("novelai_ladder")
    page.wait_for_selector(".md-search-result__link")
    links = [link.get_attribute("href") for link in page.locator(".md-search-result__link").all()]
    assert any("api/buckets/" in str(link) for link in links)
