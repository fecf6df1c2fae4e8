"""What importing the package costs, and which floors may import what."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

import hf_bucketing

PACKAGE = Path(hf_bucketing.__file__).parent
HEAVY = {"torch", "datasets", "accelerate", "diffusers", "transformers", "av", "PIL", "torchcodec"}
FLOORS = {
    **dict.fromkeys(["errors", "geometry", "assignment", "nearest", "buckets", "image_sizes", "open_table"], 0),
    **dict.fromkeys(["ladders", "cost", "shift", "units", "files", "flags"], 0),
    **dict.fromkeys(["sampling", "script"], 1),
    **dict.fromkeys(["media", "losses", "report", "tensor_cache", "hub"], 2),
    **dict.fromkeys(["mapping", "loading", "packing"], 3),
    **dict.fromkeys(["training", "testing"], 4),
}
TORCH_FREE = [name if (PACKAGE / name).is_dir() else f"{name}.py" for name, floor in FLOORS.items() if floor < 2]


def modules(*rooms: str) -> list[Path]:
    found = [
        path
        for room in rooms
        for path in ([PACKAGE / room] if room.endswith(".py") else (PACKAGE / room).rglob("*.py"))
    ]
    assert found
    return found


def run_time_imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports of a module, but for those that type checkers alone see."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    return [
        node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in hidden
    ]


def test_importing_the_package_and_planning_load_none_of_the_heavy_libraries(
    in_fresh_interpreter: Callable[[str], str],
) -> None:
    code = "import sys, hf_bucketing, hf_bucketing.plans; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(in_fresh_interpreter(code).split())
    assert "hf_bucketing" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("path", modules(*TORCH_FREE), ids=lambda path: path.name)
def test_torch_free_floors_import_no_heavy_library(path: Path) -> None:
    for node in run_time_imports(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        assert not {name.partition(".")[0] for name in names} & HEAVY, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", modules(*FLOORS.keys() & {p.name for p in PACKAGE.iterdir()}), ids=str)
def test_imports_point_only_downward(path: Path) -> None:
    relative = path.relative_to(PACKAGE).with_suffix("").parts
    for node in run_time_imports(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = relative[: len(relative) - node.level]
            target = [*base, *(node.module or "").split(".")][0]
            if target and target != relative[0] and target in FLOORS:
                assert FLOORS[target] < FLOORS[relative[0]], f"{path}:{node.lineno} imports {target}"


def test_every_room_has_a_floor() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__", "__pycache__"} == set(FLOORS)
