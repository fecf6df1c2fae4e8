"""Links of the files of the repository's root that are pages too, such as the changelog."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>[^)#:]+)(?P<anchor>#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links from the root lead to pages; what is not a page keeps its text alone."""
    if not Path(page.file.abs_src_path or "").is_symlink():
        return markdown
    root = Path(config.config_file_path).parent
    pages = {Path(file.abs_src_path).resolve(): file.src_uri for file in files if file.abs_src_path}
    pages[root / "README.md"] = "index.md"

    def lead(match: re.Match[str]) -> str:
        target = pages.get((root / match["path"]).resolve())
        return f"[{match['text']}]({target}{match['anchor'] or ''})" if target else match["text"]

    return LINK.sub(lead, markdown)
