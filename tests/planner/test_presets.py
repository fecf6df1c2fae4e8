"""Presets: config files that the scripts accept, and that fit as their plans say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from hf_bucketing.columns.source_lists import sources_from
from hf_bucketing.command_line.config_file import PRESETS
from hf_bucketing.command_line.flags import from_flags
from hf_bucketing.commands.script_settings import launcher
from hf_bucketing.planner.components import read_components
from hf_bucketing.planner.memory import plan_components, verdict_on
from hf_bucketing.planner.settings import PlanConfig
from hf_bucketing.settings import build, changed_settings, flatten
from hf_bucketing.synthetic.published import write_published_configs
from hf_bucketing.training import TrainingConfig
from tests.conftest import ROOT

MODELS: dict[str, dict[str, Any]] = json.loads((ROOT / "scripts/benchmarks/results/presets.json").read_text())[
    "models"
]


AT_ONCE = [pytest.param(model, marks=() if model == "wan-14b" else pytest.mark.every) for model in MODELS]
"""Models whose presets are tried on every commit, and the others."""


def configs_of(model: str) -> dict[str, PlanConfig]:
    return {name: build(PlanConfig, plan["config"]) for name, plan in MODELS[model].items() if "config" in plan}


def memory_of(name: str) -> int:
    """Return the GiB of each GPU of a preset."""
    return int(name.partition("gb")[0].rpartition("x")[2])


def parsed(command: str, *flags: object) -> Any:
    return importlib.import_module(f"hf_bucketing.commands.{command}").make_parser().parse_args([*map(str, flags)])


def test_there_is_a_file_for_each_plan_that_fits() -> None:
    files = {path.relative_to(PRESETS).as_posix() for path in PRESETS.rglob("*.yaml")}
    assert files == {f"{model}/{name}.yaml" for model in MODELS for name in configs_of(model)}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_scripts_accept_each_file_and_train_as_planned(model: str) -> None:
    for name, config in configs_of(model).items():
        file = PRESETS / model / f"{name}.yaml"
        args = parsed("train", "--config", file, "--dataset_dir", "cached", "--output_dir", "trained")
        training = flatten(from_flags(TrainingConfig, args))
        planned = changed_settings(config.run)
        assert {key: training[key] for key in planned} == planned
        args = parsed("prepare", "--config", file, "--dataset", "clips", "--output_dir", "prepared")
        (source,) = sources_from(vars(args), args.config)
        assert source.table.bucket_tokens
        assert source.table.bucket_frames
        folders = ("--dataset_dir", "prepared", "--cache_dir", "cache", "--output_dir", "cached")
        parsed("cache", "--config", file, *folders)
        assert f"# {launcher(config.launch)} train --config {model}/{name}" in file.read_text()


def planned_again() -> dict[str, list[str]]:
    """Return the presets to plan again: each model's first and last, and one for each combination of options."""
    seen, chosen = set[frozenset[Any]](), dict[str, list[str]]()
    for model, plans in MODELS.items():
        given = {name: plan["config"] for name, plan in plans.items() if "config" in plan}
        first, *_, last = given
        for name, config in given.items():
            options = frozenset(
                (key, value if isinstance(value, (bool, str)) else "") for key, value in config.items()
            )
            if name in (first, last) or options not in seen:
                chosen.setdefault(model, []).append(name)
            seen.add(options)
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("model", AT_ONCE)
def test_a_preset_of_each_model_fits_as_planned(model: str, tmp_path: Path) -> None:
    check_plans(model, planned_again()[model][:1], tmp_path)


@pytest.mark.every
@pytest.mark.parametrize("model", MODELS)
def test_other_presets_fit_as_planned(model: str, tmp_path: Path) -> None:
    check_plans(model, planned_again()[model][1:], tmp_path)


def check_plans(model: str, names: list[str], folder: Path) -> None:
    write_published_configs(folder, model)
    components, configs = read_components(str(folder)), configs_of(model)
    for name in names:
        assert plan_components(components, configs[name]).total == MODELS[model][name]["bytes"], name


@pytest.mark.parametrize("model", MODELS)
def test_no_preset_is_planned_to_need_more_than_its_gpus_have(model: str) -> None:
    for name in configs_of(model):
        assert verdict_on(MODELS[model][name]["bytes"], memory_of(name) * 2**30) != "does not fit", name
