"""Runs on several sources and from YAML files, as a user starts them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_bucketing.columns import PreparedDataset
from hf_bucketing.command_line.config_file import read_config_file, write_config
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.review import losses_of
from hf_bucketing.runs.run_log import read_sample_logs
from tests.columns.test_several_sources import folder_with_texts, parquet_with_bytes
from tests.conftest import launch_training, run_script_here


@pytest.fixture(scope="module")
def run_file(media_dir: Path, pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML file of a run on a folder of clips with texts and a parquet file with bytes, which is prepared."""
    root = tmp_path_factory.mktemp("several")
    clips = folder_with_texts(media_dir, root / "clips", range(6))
    faces = parquet_with_bytes(media_dir, root / "faces.parquet", range(9, 16))
    settings = {
        "pretrained_model_name_or_path": pipeline_dir,
        "dataset_dir": root / "prepared",
        "target_fps": 8,
        "bucket_frames": [1, 9, 17, 25],
        "bucket_tokens": [60, 110, 150],
        "sources": [
            {"dataset": clips},
            {"dataset": faces, "target_fps": 4, "repeats": 2, "bucket_tokens": [60], "bucket_frames": [1, 5, 9]},
        ],
        "max_sequence_length": 32,
        "dataloader_num_workers": 1,
        "report_to": "none",
        "learning_rate": "5e-3",
        "num_train_epochs": 2,
        "cache_dir": root / "cache",
    }
    (root / "run.yaml").write_text(write_config(settings))
    result = run_script_here("prepare_dataset.py", "--config", root / "run.yaml")
    assert "\nfaces " in result.stdout
    return root / "run.yaml"


def train(*flags: object) -> str:
    """Train in this process, and return what the script printed."""
    result = run_script_here("train_text_to_video.py", *flags)
    return result.stdout + result.stderr


@pytest.mark.slow
def test_a_run_repeats_exactly_from_the_settings_that_it_saved(run_file: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    launch_training("--config", run_file, "--train_batch_size", 2, "--lora_rank", 4, "--output_dir", first)
    launch_training("--config", first / "config.yaml", "--output_dir", second)
    assert losses_of(first) == losses_of(second)
    assert len(losses_of(first)) > 4
    assert read_sample_logs(first) == read_sample_logs(second)
    assert Logs(first).first_plans == Logs(second).first_plans
    weights = [load_file(folder / "pytorch_lora_weights.safetensors") for folder in (first, second)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    saved = [read_config_file(str(folder / "config.yaml")).plain() for folder in (first, second)]
    prepared = PreparedDataset.load(run_file.parent / "prepared")
    assert saved[0]["sources"] == saved[1]["sources"] == prepared.settings["sources"]
    own = [line["train_text_to_video"] for line in saved]
    assert {**own[0], "output_dir": ""} == {**own[1], "output_dir": ""}
    assert own[0]["lora_targets"] is not None

    # Every source is drawn as often as planned, and its loss is logged.
    assert prepared.sources
    for epoch, plan in Logs(first).first_plans.items():
        lines = [line for log in read_sample_logs(first) for line in log if line["epoch"] == epoch]
        drawn = Counter(index for line in lines for index in line["index"])
        assert [source for line in lines for source in line["sources"]] == [
            prepared.source_ids[index] for line in lines for index in line["index"]
        ]
        for source, (name, counts) in enumerate(plan["sources"].items()):
            rows = np.flatnonzero(prepared.source_ids == source)
            own_counts = [drawn[int(row)] for row in rows if drawn[int(row)]]
            assert counts["kept"] == len(own_counts)
            assert counts["repeated"] == sum(own_counts) - len(own_counts)
            assert counts["dropped"] == len(rows) - len(own_counts)
            assert set(own_counts) == {2 if name == "faces" else 1}
    means = [json.loads(line) for line in (first / "logs" / "losses.jsonl").read_text().splitlines()]
    assert {name for line in means for name in line if "source" in name} == {
        "loss_by_source/clips",
        "loss_by_source/faces",
    }
    result = run_script_here("report_training.py", first, "--min_fall", -9)
    assert "every planned sample seen as often as planned in 2 of 2 epochs" in result.stdout
    assert "first: source faces: " in result.stdout


@pytest.mark.slow
def test_one_file_serves_all_scripts_also_with_cached_latents(run_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "cached.yaml"
    file.write_text(run_file.read_text() + f"cached_dir: {tmp_path / 'cached'}\noutput_dir: {tmp_path / 'out'}\n")
    result = run_script_here("cache_latents.py", "--config", file)
    prepared = PreparedDataset.load(run_file.parent / "prepared")
    usable = np.count_nonzero(np.array(prepared.dataset["bucket_id"][:]) >= 0)
    assert f"{usable:8} rows encoded" in result.stdout
    assert run_script_here("cache_latents.py", "--config", file).stdout.count(f"{usable:8} rows found") == 1
    cached = PreparedDataset.load(tmp_path / "cached")
    assert {*cached.settings} == {"prepare_dataset", "sources", "cache_latents"}
    assert cached.cache is not None
    assert cached.cache.prepared == str(run_file.parent / "prepared")
    assert "    of faces = " in train("--config", file, "--dry_run", "--train_batch_size", 2)
    assert not (tmp_path / "out" / "config.yaml").exists()
    train("--config", file, "--train_batch_size", 2, "--max_train_steps", 2)
    own = read_config_file(str(tmp_path / "out" / "config.yaml")).plain()["train_text_to_video"]
    assert own["dataset_dir"] == str(tmp_path / "cached")
    report = tmp_path / "report.json"
    assert (
        "Sources, as they were prepared"
        in run_script_here("report_buckets.py", "--config", file, "--json", report).stdout
    )
    counts = json.loads(report.read_text())["sources"]
    assert [(line["name"], line["rows"]) for line in counts] == [("clips", 6), ("faces", 7)]
    assert counts[1]["samples"] == 2 * (7 - sum(counts[1]["rejections"].values()))


def test_preparing_repeats_from_the_settings_in_its_folder(run_file: Path, tmp_path: Path) -> None:
    first = run_file.parent / "prepared"
    run_script_here("prepare_dataset.py", "--config", first / "config.yaml", "--output_dir", tmp_path / "again")
    one, two = PreparedDataset.load(first), PreparedDataset.load(tmp_path / "again")
    assert one.dataset[:] == two.dataset[:]
    assert (one.table, one.open_table, one.sources) == (two.table, two.open_table, two.sources)
    assert two.settings["sources"] == one.settings["sources"]


def test_flags_name_several_sources_in_place_of_the_file(run_file: Path, media_dir: Path, tmp_path: Path) -> None:
    several = ("--dataset", run_file.parent / "clips", media_dir)
    run_script_here("prepare_dataset.py", "--config", run_file, *several, "--output_dir", tmp_path / "out")
    assert PreparedDataset.load(tmp_path / "out").sources == ("clips", media_dir.name) or media_dir.name == "clips"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": "clips"}, "sources must be a list of mappings"),
        ({"sources": [{"target_fps": "8"}]}, "line 14: this source has no dataset"),
        ({"sources": [{"dataset": "a", "repeat": "2"}]}, "line 15: there is no setting repeat; did you mean repeats?"),
        ({"sources": [{"dataset": "a", "repeats": "x"}]}, "line 15: repeats must be of type float"),
        ({"dataset": "a"}, "the file names both a dataset and sources"),
        ({"repeats": "2"}, "there is no setting repeats"),
        ({"sources": None}, "sources must be a list of mappings"),
    ],
    ids=str,
)
def test_wrong_sources_are_named_with_their_line(change, message: str, run_file: Path, tmp_path: Path) -> None:
    settings = {**read_config_file(str(run_file)).plain(), **change}
    (tmp_path / "run.yaml").write_text(write_config(settings))
    result = run_script_here("prepare_dataset.py", "--config", tmp_path / "run.yaml", check=False)
    assert result.returncode == 2
    assert message in result.stderr
