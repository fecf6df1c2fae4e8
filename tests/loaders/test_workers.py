"""Workers of a loader: how they start, and that they end with their process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from torch.utils.data import DataLoader

from hf_bucketing.loaders import worker_options
from tests.conftest import run

TRAINING = """
import os, time
from torch.utils.data import DataLoader
from hf_bucketing.loaders import worker_options

def pid(rows):
    return os.getpid()

if __name__ == "__main__":
    loader = DataLoader(range(100), collate_fn=pid, batch_size=1, **worker_options(2))
    batches = iter(loader)
    print(next(batches), next(batches), flush=True)
    time.sleep(1000)
"""


IMPORTED = """
import sys
from hf_bucketing.loaders import worker_options

def print_imported():
    print(*sys.modules)

if __name__ == "__main__":
    assert "torch" not in sys.modules
    process = worker_options(1)["multiprocessing_context"].Process(target=print_imported)
    process.start()
    process.join()
"""


UNGUARDED = """
from torch.utils.data import DataLoader
from hf_bucketing.loaders import worker_options

print(len(list(DataLoader(range(4), batch_size=1, **worker_options(2)))))
"""


def process_of(rows: list[int]) -> int:
    return os.getpid()


def test_no_workers_need_no_options() -> None:
    loader = DataLoader(range(2), collate_fn=process_of, batch_size=1, **worker_options(0))
    assert list(loader) == [os.getpid()] * 2


def test_where_there_is_no_fork_server_workers_start_as_the_platform_does(monkeypatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert worker_options(2) == {"num_workers": 2}


def test_workers_come_from_a_fork_server() -> None:
    options = worker_options(2)
    assert options["multiprocessing_context"].get_start_method() == "forkserver"
    workers = set(DataLoader(range(8), collate_fn=process_of, batch_size=1, **options))
    assert len(workers) == 2
    assert os.getpid() not in workers


@pytest.mark.slow
def test_the_fork_server_imports_what_workers_need_once_for_all(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(IMPORTED)
    imported = set(run([sys.executable, script]).stdout.split())
    assert {
        "torch",
        "datasets",
        "accelerate",
        "hf_bucketing.loaders.collators",
        "hf_bucketing.media.sample",
    } <= imported


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_before_workers_start(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(UNGUARDED)
    result = run([sys.executable, script], check=False)
    assert result.returncode == 1
    assert f'{script} has no `if __name__ == "__main__":`' in result.stderr
    assert result.stderr.count("Traceback") == 1, "no worker was started"
    assert "bootstrapping" not in result.stderr


@pytest.mark.every
@pytest.mark.parametrize("arguments", [
    ["{folder}/guarded.py"],
    pytest.param(["-c", UNGUARDED], marks=pytest.mark.every),
    pytest.param(["{folder}"], marks=pytest.mark.every),
])  # fmt: skip
def test_programs_that_workers_do_not_run_again_are_let_through(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text(UNGUARDED)
    guarded = UNGUARDED.replace("print", 'options = worker_options(2)\nif __name__ == "__main__":\n    print')
    (tmp_path / "guarded.py").write_text(guarded.replace("worker_options(2))))", "options)))"))
    assert run([sys.executable, *(part.format(folder=tmp_path) for part in arguments)]).stdout == "4\n"


@pytest.mark.slow
def test_workers_end_when_their_process_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in training.stdout.readline().split()]
        started = [*workers, *(worker.parent() for worker in workers)]
        assert len({process.pid for process in started}) == 3, "two workers and their server"
        training.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(started, timeout=1200)
    if alive:
        for process in alive:
            process.kill()
        pytest.fail(f"{alive} outlived the training process")


SIGNALLED = """
import signal, time
import torch
from torch.utils.data import DataLoader
from hf_bucketing.loaders import worker_options

def slowly(rows):
    time.sleep(0.05)
    return torch.tensor(rows)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)
    batches = iter(DataLoader(range(100), collate_fn=slowly, batch_size=1, **worker_options(1)))
    print(next(batches).tolist(), flush=True)
    input()
    print([int(next(batches)) for _ in range(8)], flush=True)
"""


@pytest.mark.every
def test_workers_outlive_the_signal_that_a_scheduler_sends_to_all_processes(tmp_path: Path) -> None:
    script = tmp_path / "signalled.py"
    script.write_text(SIGNALLED)
    command = [sys.executable, str(script)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        assert process.stdout.readline() == "[0]\n"
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate("\n", timeout=60)
    assert output == "[1, 2, 3, 4, 5, 6, 7, 8]\n"
