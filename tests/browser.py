"""Chromium for tests that look at pages, driven by playwright; nothing is fetched from a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDTHS = (1280, 390)
"""Widths in pixels at which pages are looked at: a laptop and a phone."""


OVERFLOW = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))).then(() => {
    const root = document.documentElement
    const scrolls = code => getComputedStyle(code).overflowX === "auto"
    const cut = [...document.querySelectorAll("svg.chart text")].filter(text => {
        const [own, chart] = [text.getBoundingClientRect(), text.ownerSVGElement.getBoundingClientRect()]
        return own.left < chart.left - 1 || own.right > chart.right + 1
    }).map(text => `label ${text.textContent}`)
    const wide = code => code.scrollWidth > code.clientWidth + 1 && !(code.closest(".output") && scrolls(code))
    cut.push(...[...document.querySelectorAll("pre > code")].filter(wide)
        .map(code => `code ${code.textContent.slice(0, 40)}`))
    return cut.length || root.scrollWidth <= root.clientWidth ? cut : [`page of ${root.scrollWidth} px`,
        ...[...document.body.querySelectorAll("*")]
        .filter(one => one.getBoundingClientRect().right > root.clientWidth + 1)
        .slice(0, 5).map(one => `<${one.tagName.toLowerCase()} class="${one.className}">`)]
})"""
"""Labels and code that are cut (outputs of notebooks may scroll), or the page's width and its first elements beyond
the window, once it is laid out."""


class PageFaults(NamedTuple):
    """What is wrong with a page in a browser; all empty on a good page."""

    errors: list[str]
    requests: list[str]
    broken_images: list[str]
    overflow: list[str]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A Chromium, `$CHROMIUM` or the one on the path; without one the test is skipped, but fails where CI is true."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        reason = "no chromium on the path, and CHROMIUM names none"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        yield chromium
        chromium.close()


def look_at(browser: Browser | BrowserContext, url: str, *, widths: Sequence[int] = WIDTHS) -> PageFaults:
    """Open a page, and return its console errors, requests to hosts, broken images, and what is cut by width."""
    page: Page = browser.new_page()
    page.set_viewport_size({"width": widths[0], "height": 900})
    errors: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(url, wait_until="load")
    broken = page.evaluate(
        "() => Promise.all([...document.images].map(image => image.decode().then(() => '', () => image.alt || '?')))"
    )
    overflow = []
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        overflow += [f"at {width} px: {fault}" for fault in page.evaluate(OVERFLOW)]
    page.close()
    outside = [
        request for request in requests if not request.startswith(("data:", "blob:", "file:", url.partition("#")[0]))
    ]
    return PageFaults(errors, outside, [name for name in broken if name], overflow)
