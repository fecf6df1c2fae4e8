"""What importing the package costs, and which modules may import which."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hf_bucketing

PACKAGE = Path(hf_bucketing.__file__).parent
HEAVY = {"torch", "datasets", "accelerate", "diffusers", "transformers", "av", "PIL", "torchcodec"}
LEVELS = {
    **dict.fromkeys(["errors", "units"], -2),
    "lock": -1,
    **dict.fromkeys(["buckets", "files", "hub", "randomness", "settings"], 0),
    "devices": 0.5,
    **dict.fromkeys(["command_line", "losses", "media", "plans"], 1),
    **dict.fromkeys(["columns", "loaders", "packing"], 2),
    **dict.fromkeys(["caching", "models", "report", "streaming"], 3),
    **dict.fromkeys(["testing", "training"], 4),
}
TORCH_FREE = [room for room, level in LEVELS.items() if level <= 0] + ["plans", "report"]
MODULES = sorted(PACKAGE.rglob("*.py"))


def parts_of(path: Path) -> tuple[str, ...]:
    """The dotted name of a module below the package, as parts; a package's own name for its `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def relative_imports(path: Path) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield what a module imports of the package, also inside functions and for type checkers alone, and the line."""
    folder = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*folder[: len(folder) - node.level + 1], *(node.module.split(".") if node.module else []))
            for alias in node.names:
                whole = (*base, alias.name)
                submodule = PACKAGE.joinpath(*whole)
                is_module = submodule.with_suffix(".py").exists() or (submodule / "__init__.py").exists()
                yield (whole if is_module else base), node.lineno


def run_time_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the first part of every absolute import that is not for type checkers alone, and its line."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) not in hidden and isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif id(node) not in hidden and isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0], node.lineno


def circles(graph: dict[tuple[str, ...], set[tuple[str, ...]]]) -> list[set[tuple[str, ...]]]:
    """Return the sets of modules that import each other, directly or by way of others."""

    def reached(start: tuple[str, ...]) -> set[tuple[str, ...]]:
        seen: set[tuple[str, ...]] = set()
        waiting = list(graph[start])
        while waiting:
            module = waiting.pop()
            if module in graph and module not in seen:
                seen.add(module)
                waiting += graph[module]
        return seen

    reach = {module: reached(module) for module in graph}
    found: list[set[tuple[str, ...]]] = []
    for module in graph:
        circle = {other for other in reach[module] if module in reach[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def test_importing_the_package_plans_and_reports_loads_none_of_the_heavy_libraries(
    in_fresh_interpreter: Callable[[str], str],
) -> None:
    code = """import sys, hf_bucketing, hf_bucketing.plans, hf_bucketing.report
print(*{name.partition('.')[0] for name in sys.modules})"""
    loaded = set(in_fresh_interpreter(code).split())
    assert "hf_bucketing" in loaded
    assert not loaded & (HEAVY | {"jinja2", "matplotlib"})


def test_every_exported_name_can_be_imported_and_is_seen_by_type_checkers() -> None:
    for name in hf_bucketing.__all__:
        assert getattr(hf_bucketing, name).__name__ == name
    assert set(hf_bucketing.__all__) <= set(dir(hf_bucketing))
    tree = ast.parse(Path(hf_bucketing.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(hf_bucketing.__all__) <= imported


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'BucketSampler'"):
        hf_bucketing.BucketSampler  # noqa: B018


@pytest.mark.parametrize("path", [p for p in MODULES if parts_of(p)[:1] and parts_of(p)[0] in TORCH_FREE], ids=str)
def test_torch_free_modules_import_no_heavy_library(path: Path) -> None:
    for name, line in run_time_imports(path):
        assert name not in HEAVY, f"{path}:{line}"


def test_imports_point_only_downward_also_those_for_type_checkers() -> None:
    upward = [
        f"{path.relative_to(PACKAGE)}:{line} imports {'.'.join(target)}"
        for path in MODULES
        if parts_of(path)
        for target, line in relative_imports(path)
        if target and target[0] != parts_of(path)[0] and LEVELS[target[0]] >= LEVELS[parts_of(path)[0]]
    ]
    assert not upward


def test_no_more_than_three_modules_import_each_other() -> None:
    graph = {parts_of(path): {target for target, _ in relative_imports(path)} for path in MODULES if parts_of(path)}
    assert [circle for circle in circles(graph) if len(circle) > 3] == []


def test_every_module_at_the_top_has_a_level() -> None:
    top = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert top - {"__init__", "__pycache__"} == set(LEVELS)
