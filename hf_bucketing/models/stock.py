"""Whether diffusers still calls a model as it did when packing was tested with it."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import logging
from typing import Any

from ..packing.family import Family

logger = logging.getLogger(__name__)


def warn_of_changes(family: Family) -> None:
    """Log a warning if the installed diffusers has changed the code that packing runs in another way or replaces."""
    import diffusers

    if stock_digest(family) not in family.tested_forwards:
        logger.warning(
            "diffusers %s runs %s in another way than the versions that packing was tested with. Compare packs with "
            "single samples by verify_packing(transformer), or install a version that constraints.txt names.",
            diffusers.__version__,
            family.transformer_class,
        )


@functools.cache
def stock_digest(family: Family) -> str:
    """Return a digest of every `forward` and `__call__` in the module of diffusers that defines the family's class.

    Docstrings do not enter it. The blocks and the stock processors are in that module too.
    """
    import diffusers

    module: Any = inspect.getmodule(getattr(diffusers, family.transformer_class))
    source = inspect.getsource(module)
    lines, parts = source.split("\n"), []
    for cls in ast.parse(source).body:
        for node in cls.body if isinstance(cls, ast.ClassDef) else []:
            if isinstance(node, ast.FunctionDef) and node.name in ("forward", "__call__"):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                parts += [cls.name, node.name, ast.unparse(node.args)]  # type: ignore[attr-defined]
                parts += [_segment(lines, statement) for statement in body]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _segment(lines: list[str], node: ast.stmt) -> str:
    """Return what `ast.get_source_segment` does, which splits the whole module into lines for each statement."""
    assert node.end_lineno is not None
    text = "\n".join(lines[node.lineno - 1 : node.end_lineno]).encode()  # offsets count bytes
    behind = len(lines[node.end_lineno - 1].encode()) - (node.end_col_offset or 0)
    return text[node.col_offset : len(text) - behind].decode()
