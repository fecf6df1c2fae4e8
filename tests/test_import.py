"""What importing the package costs, and which modules may import which."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import hf_bucketing

PACKAGE = Path(hf_bucketing.__file__).parent
SLOW_TO_IMPORT = {"torch", "datasets", "accelerate", "diffusers", "transformers", "peft", "ray", "matplotlib"}
HEAVY = {"torch", "datasets", "accelerate", "diffusers", "transformers", "av", "PIL", "torchcodec"}
LEVELS = {
    **dict.fromkeys(["errors", "formats", "marks", "units"], -2),
    "lock": -1,
    **dict.fromkeys(["buckets", "files", "hub", "randomness", "settings"], 0),
    "devices": 0.5,
    "conditions": 0.7,
    **dict.fromkeys(["command_line", "losses", "media", "plans"], 1),
    **dict.fromkeys(["columns", "loaders", "packing"], 2),
    **dict.fromkeys(["caching", "models", "report", "streaming"], 3),
    **dict.fromkeys(["optimizers", "placement"], 4),
    "adapters": 4.2,
    "configuration": 4.3,
    "batching": 4.35,
    "planner": 4.4,
    "runs": 4.32,
    "synthetic": 4.4,
    "training": 5,
    "commands": 5.5,
    "__main__": 6,
}
TORCH_FREE = [room for room, level in LEVELS.items() if level <= 0] + ["conditions", "plans", "report"]
USERS_SCRIPTS = sorted((PACKAGE.parent / "scripts").glob("*.py"))
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


def test_reports_of_runs_read_logs_without_torch(in_fresh_interpreter: Callable[[str], str]) -> None:
    code = """import sys, hf_bucketing.runs.review, hf_bucketing.runs.page
print(*{name.partition('.')[0] for name in sys.modules})"""
    assert not set(in_fresh_interpreter(code).split()) & {
        "torch",
        "datasets",
        "accelerate",
        "transformers",
        "diffusers",
    }


@pytest.mark.slow
def test_families_are_found_without_what_training_installs(in_fresh_interpreter: Callable[[str], str]) -> None:
    code = """import sys
sys.modules |= dict.fromkeys(["ftfy", "peft", "tensorboard", "transformers"])
from hf_bucketing.models.registry import families
print(*families())"""
    assert {"WanTransformer3DModel", "LTX2VideoTransformer3DModel"} <= {*in_fresh_interpreter(code).split()}


@pytest.mark.parametrize("stub", sorted(PACKAGE.rglob("__init__.pyi")), ids=lambda stub: stub.parent.name)
def test_every_name_that_a_package_exports_can_be_imported(stub: Path) -> None:
    """Packages import what their stub names when it is first used; type checkers read the stub itself."""
    package = importlib.import_module(".".join(stub.parent.relative_to(PACKAGE.parent).parts))
    assert package.__all__
    for name in package.__all__:
        assert not isinstance(getattr(package, name), ModuleType), name


@pytest.mark.slow
def test_a_function_named_as_its_module_stays_the_function_after_the_module_is_imported(
    in_fresh_interpreter: Callable[[str], str],
) -> None:
    code = """import hf_bucketing, hf_bucketing.loaders.resume, hf_bucketing.media.probe
from hf_bucketing.loaders import resume
from hf_bucketing.media import probe
print(*map(callable, (hf_bucketing.resume, resume, probe)))"""
    assert in_fresh_interpreter(code).split() == ["True"] * 3


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="BucketSampler"):
        hf_bucketing.BucketSampler  # noqa: B018


@pytest.mark.parametrize("script", USERS_SCRIPTS, ids=lambda script: script.stem)
def test_a_misspelt_flag_is_refused_before_a_slow_library_is_imported(
    script: Path, in_fresh_interpreter: Callable[[str], str]
) -> None:
    code = f"""import runpy, sys
sys.argv = [{str(script)!r}, "--no_such_flag"]
sys.path[0] = {str(script.parent)!r}
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print(end.code, *{{name.partition('.')[0] for name in sys.modules}})"""
    end, *loaded = in_fresh_interpreter(code).split()
    assert end == "2"
    assert not {*loaded} & SLOW_TO_IMPORT


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


def test_no_files_import_each_other_also_for_type_checkers() -> None:
    graph = {parts_of(path): {target for target, _ in relative_imports(path)} for path in MODULES if parts_of(path)}
    assert circles(graph) == []


def test_a_circle_of_files_is_found() -> None:
    graph = {("a",): {("b",)}, ("b",): {("c",)}, ("c",): {("a",)}, ("d",): {("a",), ("elsewhere",)}}
    assert circles(graph) == [{("a",), ("b",), ("c",)}]


def test_every_module_at_the_top_has_a_level() -> None:
    top = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert top - {"__init__", "__pycache__"} == set(LEVELS)
