"""One YAML file for all scripts of a run: which names it may hold, and what a run writes into its own."""

from __future__ import annotations

import os
import re
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_bucketing.caching.settings import CacheConfig
from hf_bucketing.columns.settings import SourceConfig
from hf_bucketing.command_line.config_file import PATHS, ConfigFile, read_config_file, write_config
from hf_bucketing.commands import train
from hf_bucketing.commands.script_settings import NOT_PLANNED, settings_kept, settings_of_scripts
from hf_bucketing.planner.settings import PlanConfig
from hf_bucketing.report.measure import ReportConfig
from hf_bucketing.settings import flag_names, names_of, parts_of, settings_in
from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.loop import settings_to_repeat
from tests.conftest import ROOT


def repeated(config: TrainingConfig, file: ConfigFile, **chosen: object) -> dict[str, Any]:
    """Return the settings that repeat a run which was started with a file."""
    return settings_to_repeat(config, made_with={}, kept=partial(settings_kept, file), **chosen)


def test_a_file_may_hold_every_setting_of_a_command() -> None:
    known = settings_of_scripts()
    assert {*known} == {
        "prepare_dataset",
        "cache_latents",
        "train_text_to_video",
        "plan_memory",
        "suggest_run",
        "report_buckets",
        "report_training",
    }
    assert known["train_text_to_video"] == {*flag_names(TrainingConfig)}
    assert {*flag_names(PlanConfig)} - NOT_PLANNED < known["plan_memory"]
    assert known["prepare_dataset"] > {*flag_names(SourceConfig), "streaming", "output_dir"}


@pytest.mark.parametrize("section", sorted(settings_of_scripts()))
def test_a_section_has_the_name_of_a_script(section: str) -> None:
    parser = runpy.run_path(str(ROOT / "scripts" / f"{section}.py"))["make_parser"]()
    assert parser.section == (section, settings_of_scripts()[section])


@pytest.mark.parametrize("kind", [TrainingConfig, SourceConfig, CacheConfig, ReportConfig, PlanConfig])
def test_every_setting_that_names_a_file_or_a_folder_counts_as_a_path(kind: type) -> None:
    says = re.compile(r"Folder|File|Files|Diffusers pipeline to|Data to prepare|Cost of tokens as a run measured it")
    names = {setting.name for setting in settings_in(kind) if Path in parts_of(setting.hint)}
    names |= {setting.name for setting in settings_in(kind) if says.match(setting.help.replace("Prepared f", "F"))}
    assert names - {"folder"} <= PATHS
    assert {name for name in names_of(kind) if name.endswith(("_dir", "_folder", "_path"))} <= PATHS


def test_a_saved_run_means_the_same_from_another_folder_and_hub_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("start/demo/tiny", "start/clips", "elsewhere", "start/files"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "start" / "files" / "a.png").touch()
    monkeypatch.chdir(tmp_path / "start")
    (tmp_path / "start" / "run.yaml").write_text("sources:\n- dataset: clips\n- dataset: owner/clips\n")
    config = TrainingConfig.from_flat(
        pretrained_model_name_or_path="demo/tiny", dataset_dir="prepared", output_dir="out", lora_rank=2,
        init_from_adapters="owner/adapters", validation_images=["files/a.png"], validation_prompts=["red"],
    )  # fmt: skip
    saved = write_config(repeated(config, read_config_file("run.yaml")))
    (tmp_path / "config.yaml").write_text(saved)
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = read_config_file(str(tmp_path / "config.yaml"), find_paths=True).plain()
    start = tmp_path / "start"
    assert again["sources"] == [{"dataset": str(start / "clips")}, {"dataset": "owner/clips"}]
    own = again["train_text_to_video"]
    assert (own["pretrained_model_name_or_path"], own["init_from_adapters"]) == (
        str(start / "demo" / "tiny"), "owner/adapters",
    )  # fmt: skip
    assert (own["dataset_dir"], own["output_dir"]) == (str(start / "prepared"), str(start / "out"))
    assert own["validation_images"] == [str(start / "files" / "a.png")]


def test_saved_settings_leave_those_of_other_scripts_as_the_file_has_them(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "pretrained_model_name_or_path: m\ndataset_dir: d\ncached_dir: c\noutput_dir: o\nrandom_crop: false\n"
        "num_train_epochs: 1\nsources:\n- dataset: a\n  repeats: 2\ncache_latents:\n  batch_size: 3\n"
        "train_text_to_video:\n  seed: 5\n"
    )
    config = TrainingConfig(pretrained_model_name_or_path="m", dataset_dir="c", output_dir="o", seed=5)
    saved = repeated(config, read_config_file(str(tmp_path / "run.yaml")), mixed_precision="no")
    (tmp_path / "config.yaml").write_text(write_config(saved))
    again = read_config_file(str(tmp_path / "config.yaml")).plain()
    own = again.pop("train_text_to_video")
    assert again == {
        "pretrained_model_name_or_path": "m",
        "dataset_dir": os.path.abspath("d"),
        "cached_dir": os.path.abspath("c"),
        "output_dir": os.path.abspath("o"),
        "random_crop": "false",
        "sources": [{"dataset": "a", "repeats": "2"}],
        "cache_latents": {"batch_size": "3"},
    }
    assert set(own) == set(config.flat())
    assert (own["seed"], own["dataset_dir"], own["mixed_precision"], own["lora_rank"]) == (
        "5",
        os.path.abspath("c"),
        "no",
        None,
    )
    parser = train.make_parser()
    args = parser.parse_args(["--config", str(tmp_path / "config.yaml"), "--output_dir", "other"])
    expected = {**config.flat(), "output_dir": "other", "dataset_dir": os.path.abspath("c"), "mixed_precision": "no"}
    assert {name: getattr(args, name) for name in expected} == expected
