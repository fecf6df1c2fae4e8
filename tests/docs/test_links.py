"""Every file and heading that README.md and docs/ link to exists."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import PAGES, Page, folder_of

HEADING = re.compile(r"^#{1,6} +(.*)$", re.MULTILINE)


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as mkdocs and GitHub make it for plain words."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower())


def links(page: Page) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", page.text) if "://" not in link]


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if links(page)])
def test_every_linked_file_and_heading_exists(name: str) -> None:
    page = PAGES[name]
    for link in links(page):
        file, _, heading = link.partition("#")
        target = folder_of(page) / file if file else folder_of(page) / name.rpartition("/")[2]
        if target.parent.name == "notebooks":  # whose pages are made of the notebooks
            target = target.with_suffix(".ipynb")
        assert target.exists(), f"{name} links to {link}"
        if heading:
            whole = Page(name, target.read_text())
            assert heading in [anchor(title) for title in HEADING.findall(whole.text)], f"{name} links to {link}"
