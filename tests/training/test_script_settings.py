"""One YAML file for all scripts of a run: which names it may hold, and what a run writes into its own."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from hf_bucketing.command_line.config_file import read_config_file, write_config
from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.script_settings import settings_of_scripts, settings_to_repeat
from tests.conftest import ROOT


@pytest.mark.parametrize("script", sorted(settings_of_scripts()))
def test_a_file_may_hold_every_setting_of_a_script(script: str) -> None:
    parser = runpy.run_path(str(ROOT / "scripts" / f"{script}.py"))["make_parser"]()
    names = {action.dest for action in parser._actions} - {"help", "config"}
    known = settings_of_scripts()[script]
    assert names <= known
    assert known - names == set() or script == "plan_memory"  # which refuses nothing that a run has


def test_saved_settings_leave_those_of_other_scripts_as_the_file_has_them(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "pretrained_model_name_or_path: m\ndataset_dir: d\ncached_dir: c\noutput_dir: o\nrandom_crop: false\n"
        "num_train_epochs: 1\nsources:\n- dataset: a\n  repeats: 2\ncache_latents:\n  batch_size: 3\n"
        "train_text_to_video:\n  seed: 5\n"
    )
    config = TrainingConfig(pretrained_model_name_or_path="m", dataset_dir="c", output_dir="o", seed=5)
    saved = settings_to_repeat(config, read_config_file(str(tmp_path / "run.yaml")), mixed_precision="no")
    (tmp_path / "config.yaml").write_text(write_config(saved))
    again = read_config_file(str(tmp_path / "config.yaml")).plain()
    own = again.pop("train_text_to_video")
    assert again == {
        **{"pretrained_model_name_or_path": "m", "dataset_dir": "d", "cached_dir": "c", "output_dir": "o"},
        **{
            "random_crop": "false",
            "sources": [{"dataset": "a", "repeats": "2"}],
            "cache_latents": {"batch_size": "3"},
        },
    }
    assert set(own) == set(config.flat())
    assert (own["seed"], own["dataset_dir"], own["mixed_precision"], own["lora_rank"]) == ("5", "c", "no", None)
    parser = runpy.run_path(str(ROOT / "scripts" / "train_text_to_video.py"))["make_parser"]()
    args = parser.parse_args(["--config", str(tmp_path / "config.yaml"), "--output_dir", "other"])
    expected = {**config.flat(), "output_dir": "other", "mixed_precision": "no"}
    assert {name: getattr(args, name) for name in expected} == expected
