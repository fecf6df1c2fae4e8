"""Reports, suggestions and training count one plan, also where rows occur more or less often than once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from hf_bucketing.batching.rows import make_data
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.columns.prepared import ROW_WEIGHT
from hf_bucketing.planner import PlanConfig
from hf_bucketing.planner.components import read_components
from hf_bucketing.planner.gpus import TimeConfig
from hf_bucketing.planner.rows import DataRows
from hf_bucketing.planner.settings import MachineConfig
from hf_bucketing.planner.suggestion import Candidate, Suggester
from hf_bucketing.planner.time import Speed
from hf_bucketing.planner.ways import ways_of
from hf_bucketing.plans import EpochPlan
from tests.conftest import run_script_here
from tests.training.training_cases import in_process, run as losses_of_run

PACK = {"batching": "pack", "max_tokens": 640, "strip_length": 16, "train_batch_size": 1}
MACHINE = MachineConfig(gpu_memory=1.0, num_train_epochs=2)
BASE = PlanConfig.from_flat(device="cpu", mixed_precision="no", max_sequence_length=16, strip_length=16, lora_rank=4)


@pytest.fixture(scope="module")
def weighted_dir(prepared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of two sources, one of them with 2.5 repeats, which weigh their rows too."""
    prepared = PreparedDataset.load(prepared_dir)
    rows = np.arange(len(prepared.dataset))
    weights = np.where(rows % 2, 2.5, 1.0) * np.array([1.0, 3.0, 0.0, 0.5, 6.0])[rows % 5]
    folder = tmp_path_factory.mktemp("weighted") / "prepared"
    dataclasses.replace(prepared, dataset=prepared.dataset.add_column(ROW_WEIGHT, weights)).save(folder)
    return folder


def trained_plan(folder: Path, place: Path, **settings: object) -> EpochPlan:
    """Return the plan of the first epoch of a run."""
    config = in_process("none", folder, place, **settings)
    return make_data(config, PreparedDataset.load(folder).spec, ModelTokens(width=96)).sampler.plan(0)


def candidates_of(folder: Path, pipeline: Path) -> tuple[Candidate, ...]:
    components, prepared = read_components(str(pipeline)), PreparedDataset.load(folder)
    rows = DataRows.of_prepared(prepared)
    ways = ways_of({"own": (None, prepared.table)}, rows.sizes, spec=prepared.spec, assigned=rows.assigned)
    speed = Speed.of(TimeConfig(), gpu_memory=24)
    return Suggester(components, rows, machine=MACHINE, base=BASE, speed=speed).suggest(ways).candidates


def test_a_report_counts_the_samples_and_steps_that_training_plans(weighted_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    printed = run_script_here(
        "report_buckets.py", weighted_dir, batch_size=2, num_processes=1, max_tokens=640, strip_length=16,
        max_area="none", compare="diffusers", json=file,
    ).stdout  # fmt: skip
    report = json.loads(file.read_text())
    padding, bucketing, packing = report["strategies"]
    for strategy, settings in ((bucketing, {"train_batch_size": 2}), (packing, PACK)):
        plan = trained_plan(weighted_dir, tmp_path, **settings)
        assert (strategy["kept"], strategy["num_steps"]) == (len(plan.indices), plan.num_steps)
        if strategy is bucketing:
            buckets = report["buckets"]["buckets"]
            ids = PreparedDataset.load(weighted_dir).dataset["bucket_id"][:]
            counts = np.bincount(np.array(ids)[plan.indices], minlength=len(buckets))
            assert [bucket["num_samples"] - bucket["dropped"] for bucket in buckets] == counts.tolist()
    asked = report["buckets"]["samples_per_epoch"]
    assert asked > report["buckets"]["num_samples"]
    assert f"{asked} samples per epoch, by repeats and weights" in printed
    for strategy in (padding, bucketing, packing):
        assert strategy["kept"] + sum(strategy["dropped"].values()) == asked
    for peer in report["peers"]:
        assert peer["kept"] + sum(peer["skipped"].values()) == asked


@pytest.mark.every
def test_suggested_runs_count_the_samples_and_steps_that_training_plans(
    weighted_dir: Path, prepared_dir: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    runs = candidates_of(weighted_dir, pipeline_dir)
    for run in runs:
        settings = {
            "batching": run.way.batching,
            "max_tokens": run.config.run.batches.max_tokens,
            "train_batch_size": 1,
        }
        settings |= {"strip_length": 16} if run.way.batching == "pack" else {}
        plan, once = (trained_plan(folder, tmp_path, **settings) for folder in (weighted_dir, prepared_dir))
        assert (run.num_rows - run.num_dropped, run.time.steps) == (len(plan.indices), plan.num_steps)
        assert run.kept <= 1
        assert run.once is not None
        assert run.once.steps == once.num_steps < plan.num_steps, "a cache encodes each row once"
    assert {run.way.batching for run in runs} == {"bucket", "pack"}


@pytest.mark.slow
def test_a_column_index_of_the_table_changes_nothing_in_a_run(
    prepared_dir: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    prepared = PreparedDataset.load(prepared_dir)
    shared = np.arange(len(prepared.dataset)) // 2
    dataclasses.replace(prepared, dataset=prepared.dataset.add_column("index", shared)).save(tmp_path / "prepared")
    losses, logs = [], []
    for number, folder in enumerate((prepared_dir, tmp_path / "prepared")):
        losses.append(losses_of_run(in_process(pipeline_dir, folder, tmp_path / str(number), max_train_steps=5)))
        logs.append((tmp_path / str(number) / "logs" / "samples-0.jsonl").read_text())
    assert losses[0] == losses[1]
    assert logs[0] == logs[1]
    drawn = [index for line in logs[1].splitlines() for index in json.loads(line)["index"]]
    assert len(drawn) == len({*drawn})
