"""A page for each notebook, with the outputs that are stored in it."""

from __future__ import annotations

import re

from jinja2 import DictLoader
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

TEMPLATE = """
{%- extends "markdown/index.md.j2" -%}
{%- block stream -%}
``` { .text .no-copy .output }
{{ output.text | trim }}
```
{% endblock stream -%}
{%- block data_text scoped -%}
``` { .text .no-copy .output }
{{ output.data["text/plain"] | trim }}
```
{% endblock data_text -%}
"""
PANDAS_TABLE = '<table border="1" class="dataframe">'
"""Tables without a class look as all others, and scroll where they are too wide."""
LINK = re.compile(r"(?<=\.)ipynb(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page and its pictures for each notebook; the notebook itself stays, to be downloaded."""
    exporter = MarkdownExporter(
        extra_loaders=[DictLoader({"notebook.md.j2": TEMPLATE})], template_file="notebook.md.j2"
    )
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        stem = notebook.src_uri.removesuffix(".ipynb")
        names = {"unique_key": stem.rpartition("/")[2]}
        text, resources = exporter.from_filename(notebook.abs_src_path, resources=names)
        title, _, rest = text.replace(PANDAS_TABLE, "<table>").lstrip().partition("\n")
        download = f"[Download this notebook]({notebook.name}.ipynb)"
        files.append(File.generated(config, f"{stem}.md", content=f"{title}\n\n{download}\n{pages(rest)}"))
        for name, content in resources["outputs"].items():
            files.append(File.generated(config, f"{stem.rpartition('/')[0]}/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to a notebook lead to its page."""
    return markdown if page.file.src_uri.startswith("notebooks/") else pages(markdown)


def pages(markdown: str) -> str:
    """Return Markdown whose links to notebooks lead to their pages."""
    return LINK.sub("md", markdown)
