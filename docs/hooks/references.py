"""References and examples of the docstrings, as mkdocstrings understands them.

Docstrings name an object as [`Name`], as diffusers' do; here it becomes a link where a page of the API has the object,
and stays a name elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

REFERENCE = re.compile(r"\[`(?P<text>[\w.]+)`\](?:\[(?P<path>[\w.]+)\])?(?![\[(])")
EXAMPLE = re.compile(r"^([ \t]*)Example:$", re.MULTILINE)


class References(griffe.Extension):
    """Rewrite the docstrings of a package once it is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            text = REFERENCE.sub(lambda match: link(obj, match), obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(r"\1Examples:", text)


def link(obj: griffe.Object, match: re.Match[str]) -> str:
    """Return a link to what a reference means where it stands, or its text if that is not an object."""
    text = match["text"]
    try:
        path = resolve(obj, match["path"] or text)
    except griffe.NameResolutionError:
        return f"`{text}`"
    return f'<autoref optional identifier="{path}"><code>{text}</code></autoref>'


def resolve(obj: griffe.Object, name: str) -> str:
    """Return the full path of a dotted name, which may be full already."""
    first, _, rest = name.partition(".")
    if first == obj.package.name:
        return name
    path = obj.resolve(first)
    return f"{path}.{rest}" if rest else path
