"""Resuming in real processes: at every step, after a kill, and on other numbers of processes."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import launch as launch_script
from tests.loaders.loader_worker import IDS

WORKER = Path(__file__).parent / "loader_worker.py"


def launch(mode: str, output: Path, options, *, num_processes: int, check: bool = True):
    """Run loader_worker.py in forked processes."""
    arguments = (WORKER, mode, output, "--options", json.dumps(options))
    return launch_script(*arguments, num_processes=num_processes, check=check)


def log_of(output: Path, num_processes: int) -> list[list[list]]:
    """Lines of each process, each step's once; where a step was run again, it gave the same."""
    logs = []
    for process in range(num_processes):
        lines: dict[tuple[int, int], list] = {}
        for line in map(json.loads, (output / f"log-{process}.jsonl").read_text().splitlines()):
            assert lines.setdefault((line[0], line[1]), line) == line, "a step that is run again repeats itself"
        logs.append([lines[key] for key in sorted(lines)])
    return logs


COMBINATIONS = {
    1: [
        {"accumulation": 3, "kind": "pack"},
        {"stateful": True},
        {"accumulation": 2, "stateful": True, "num_workers": 2, "persistent": True},
    ],
    2: [{"accumulation": 2, "num_workers": 1, "persistent": True}, {"stateful": True, "num_workers": 1}],
    3: [{"accumulation": 2, "stateful": True, "kind": "pack"}],
}


@pytest.mark.cases(slow=("2",))
@pytest.mark.parametrize("num_processes", COMBINATIONS)
def test_save_state_and_load_state_repeat_rows_and_losses_from_every_step(num_processes: int, tmp_path: Path) -> None:
    combinations = [{"rows": min(20 * num_processes, len(IDS)), **options} for options in COMBINATIONS[num_processes]]
    launch("every_step", tmp_path, combinations, num_processes=num_processes)


@pytest.mark.slow
def test_a_killed_and_relaunched_run_equals_one_that_was_not(tmp_path: Path) -> None:
    options = {"epochs": 3, "save_every": 3, "kill_at": 0, "num_workers": 1, "accumulation": 2}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    launch("train", tmp_path / "whole", options, num_processes=2)
    killed = {**options, "kill_at": random.Random().randint(1, 18)}
    result = launch("train", tmp_path / "killed", killed, num_processes=2, check=False)
    assert result.returncode
    launch("train", tmp_path / "killed", options, num_processes=2)
    assert log_of(tmp_path / "killed", 2) == log_of(tmp_path / "whole", 2), killed


@pytest.mark.slow
def test_real_runs_on_two_three_and_one_process_share_one_epoch(tmp_path: Path) -> None:
    for number, num_processes in enumerate([2, 3, 1]):
        # Each is killed after a batch that no checkpoint holds, but for the last one.
        kill_at = (2, 4, 0)[number]
        options = {"epochs": 1, "save_every": 1, "num_workers": 2, "kill_at": kill_at}
        result = launch("train", tmp_path, options, num_processes=num_processes, check=False)
        assert bool(result.returncode) == bool(kill_at), result.stderr
    seen = Counter(row for process in range(3) for rows in _rows(tmp_path, process) for row in rows)
    assert len(set(np.flatnonzero(IDS >= 0)) - set(seen)) < 3
    assert 0 < seen.total() - len(seen) <= 4 * (2 + 3), "the batch on each process that was not saved"


def _rows(output: Path, process: int) -> list[list[int]]:
    log = output / f"log-{process}.jsonl"
    return [json.loads(line)[2] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.slow
def test_a_transformers_trainer_takes_every_step_and_resumes_in_the_epoch_that_it_left(tmp_path: Path) -> None:
    launch_script(WORKER.parent / "trainer_worker.py", tmp_path)


@pytest.mark.slow
def test_samplers_follow_torch_distributed_accelerate_and_its_device_mesh() -> None:
    launch_script(WORKER.parent / "processes_worker.py", num_processes=4)
