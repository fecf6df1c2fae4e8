"""A limit and its default are written once, in the configuration of a plan or of a stream."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import numpy as np
import pytest

import hf_bucketing
from hf_bucketing import BucketTable, CostModel, LatentSpec, Size
from hf_bucketing.errors import PlanError
from hf_bucketing.plans import BucketPlanConfig, LengthPlanConfig, PackPlanConfig, plan_buckets
from hf_bucketing.streaming.config import StreamConfig

NEUTRAL = (MISSING, None, False, 0, 1)
"""Defaults that set no limit, so that several places may write them."""

LIMITS = {
    field.name
    for kind in (BucketPlanConfig, LengthPlanConfig, PackPlanConfig, StreamConfig)
    for field in fields(kind)
    if field.default not in NEUTRAL or field.default is True
}


def settings_of(node: ast.AST) -> Iterator[tuple[str, ast.expr | None, ast.expr]]:
    """Yield the name, type and default of each argument of a function, or of each field of a class."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args]
        with_default = arguments[len(arguments) - len(node.args.defaults) :]
        pairs = [*zip(with_default, node.args.defaults, strict=True)]
        pairs += [*zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
        yield from ((argument.arg, argument.annotation, default) for argument, default in pairs if default)
    if isinstance(node, ast.ClassDef):
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value:
                yield from setting_of(line.target.id, line.annotation, line.value)


def setting_of(name: str, hint: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """Yield one field of a class; the metadata of a `field(…)` may say which argument of a plan it is."""
    if not isinstance(value, ast.Call):
        yield name, hint, value
        return
    options = {keyword.arg: keyword.value for keyword in value.keywords}
    match options.get("metadata"):
        case ast.Dict(keys=[ast.Constant(value="argument")], values=[ast.Constant(value=str(argument))]):
            name = argument
    if "default" in options:
        yield name, hint, options["default"]


def literal(value: ast.expr) -> bool:
    """Return whether a default is written out and not read from elsewhere."""
    return not any(isinstance(node, ast.Attribute | ast.Name | ast.Call) for node in ast.walk(value))


def written_defaults(folder: Path) -> dict[tuple[str, str], list[str]]:
    """Return where the default of each limit is written, by its name and type."""
    places = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for name, hint, value in settings_of(node):
                if name in LIMITS and hint and literal(value) and ast.unparse(value) not in map(repr, NEUTRAL):
                    places[name, ast.unparse(hint)].append(f"{path.relative_to(folder)}:{value.lineno}")
    return places


@pytest.mark.slow
def test_the_default_of_a_limit_is_written_once() -> None:
    places = written_defaults(Path(hf_bucketing.__file__).parent)
    assert {"strip_length", "window", "oversize", "max_buffered"} <= {name for name, _ in places}
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_a_second_default_of_a_limit_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    strip_length: int = 64\n    window: int = A.window\n")
    (tmp_path / "b.py").write_text("def b(*, strip_length: int = 32, window: int = 3): ...\n")
    (tmp_path / "c.py").write_text("class C:\n    s: S = field(default='x', metadata={'argument': 'strategy'})\n")
    assert written_defaults(tmp_path) == {
        ("strip_length", "int"): ["a.py:2", "b.py:1"],
        ("window", "int"): ["b.py:1"],
        ("strategy", "S"): ["c.py:2"],
    }


TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(1, 64, 128), Size(1, 128, 192)))
SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))


def test_limits_give_each_bucket_as_many_samples_as_fit_within_all_of_them() -> None:
    cost = CostModel(linear=1, quadratic=0.5)
    limits = BucketPlanConfig(max_tokens=256, max_cost=5100, cost_model=cost, max_samples=10)
    ids = np.arange(3)
    assert limits.solved_sizes(ids, table=TABLE, spec=SPEC, text_tokens=0).tolist() == [10, 8, 1]
    assert limits.solved_sizes(ids, table=TABLE, spec=SPEC, text_tokens=4).tolist() == [10, 7, 1]
    fixed = BucketPlanConfig(batch_size={0: 3, 1: 2, 2: 1})
    assert fixed.solved_sizes(ids, table=TABLE, spec=None, text_tokens=9).tolist() == [3, 2, 1]


def test_a_plan_without_a_table_refuses_limits() -> None:
    with pytest.raises(PlanError, match="`max_tokens` and `max_cost` need a table of buckets"):
        plan_buckets([0, 1], BucketPlanConfig(max_tokens=64), epoch=0, num_processes=1)
