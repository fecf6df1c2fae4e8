"""The commands of the page of object stores, on two nodes beside an S3 server; one dies, and one resumes."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hf_bucketing.runs.review import losses_of
from tests.conftest import ROOT, as_flags, launch_training
from tests.docs.pages import PAGES, run_call
from tests.docs.test_model_pages import on_small_weights
from tests.object_store import BUCKET, object_store
from tests.processes import dump_stacks_and_end

PAGE = PAGES["docs/object-stores.md"]
STEPS = 8
FEW = as_flags(max_train_steps=STEPS, checkpointing_steps=2, dataloader_num_workers=1, mixed_precision="no")
SECONDS = 240.0


def start_node(rank: int, *, port: int, flags: list[object]) -> subprocess.Popen[bytes]:
    """Start one of two nodes, with one process each, as Slurm does."""
    slurm = {"SLURM_NNODES": "2", "SLURM_NODEID": str(rank), "PROCESSES_PER_NODE": "1"}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHON": sys.executable}
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "launch" / "train_node.sh"), *map(str, flags)],
        env={**os.environ, **slurm, **rendezvous, "ACCELERATE_USE_CPU": "true"},
    )


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def train_on_two_nodes_until(done: Callable[[], bool], flags: list[object]) -> None:
    """Kill all processes of the second node when something is done, and wait for the first one to end."""
    port = free_port()
    nodes = [start_node(rank, port=port, flags=flags) for rank in range(2)]
    try:
        deadline = time.monotonic() + SECONDS
        while not done():
            assert all(node.poll() is None for node in nodes), "a node ended before it could be killed"
            assert time.monotonic() < deadline, "they never came as far"
            time.sleep(0.05)
        second = psutil.Process(nodes[1].pid)
        for process in [second, *second.children(recursive=True)]:
            process.kill()
        assert nodes[0].wait(SECONDS) != 0
    finally:
        for node in nodes:
            if node.poll() is None:
                dump_stacks_and_end(node.pid)


@pytest.mark.every
@pytest.mark.slow
def test_two_nodes_train_from_a_bucket_and_one_resumes_after_the_other_died(
    media_dir: Path, pipeline_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"Wan-AI/Wan2.1-T2V-1.3B-Diffusers": str(pipeline_dir)}
    calls = dict(PAGE.under("## Prepare, look, cache").calls()[:3])
    (command,) = [line for line in PAGE.commands() if line.startswith("bash scripts/launch/train_node.sh")]
    flags = [*on_small_weights(shlex.split(command)[2:], names), *FEW]
    with object_store() as store:
        store.put(str(media_dir), f"{BUCKET}/clips", recursive=True)
        run_call("prepare", *on_small_weights(calls["prepare"], names), "--num_proc", 1)
        cache = [*on_small_weights(calls["cache"], names)]
        (encoded,) = re.findall(r"(\d+) rows encoded", run_call("cache", *cache).stdout)
        assert int(encoded) > 10
        assert f"{encoded} rows found" in run_call("cache", *cache).stdout
        assert not Path("cache").exists()
        ((_, suggest),) = PAGE.under("## Is the store fast enough?").calls()
        here = as_flags(gpu_memory=1, num_gpus=2, device="cpu", mixed_precision="no", target_fps=8)
        said = run_call("suggest", *on_small_weights(suggest, names), *here).stdout
        assert re.search(r"\d+ decoding process", said)
        train_on_two_nodes_until(lambda: any(Path("trained").glob("checkpoint-*")), flags)
        resumed = launch_training(*flags, num_processes=1)
        assert "Resumed after optimizer step" in resumed.stderr
        assert len(losses_of(Path("trained"))) == STEPS
        run_call("report run", "trained", min_fall=-9)


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_job_of_slurm_starts_as_many_processes_as_it_has_gpus_on_each_node(tmp_path: Path) -> None:
    program(tmp_path, "scontrol", "echo first; for node in {2..9999}; do echo $node; done")
    program(tmp_path, "srun", 'for rank in 0 1; do SLURM_NODEID=$rank "${@:2}"; done')
    python = program(tmp_path, "starts", 'echo "$@"')
    slurm = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NODELIST": "n", "SLURM_SUBMIT_DIR": str(ROOT)}
    env = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(python)}
    (command,) = [line for line in PAGE.commands() if line.startswith("sbatch")]
    script, *flags = shlex.split(command)[3:]
    started = subprocess.run(["bash", str(ROOT / script), *flags], env=env, capture_output=True, text=True, check=True)
    for rank, line in enumerate(started.stdout.splitlines()):
        assert f"--nnodes 2 --node-rank {rank} --nproc-per-node 4 --master-addr first " in line
        assert line.endswith("train_text_to_video.py --config run.yaml --resume_from_checkpoint latest")
    assert rank == 1


@pytest.mark.parametrize("missing", ["NNODES", "NODE_RANK", "MASTER_ADDR"])
def test_a_node_that_is_not_told_its_place_says_what_to_set(missing: str) -> None:
    env = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "PATH": os.environ["PATH"], "PYTHON": "false"}
    del env[missing]
    script = ROOT / "scripts" / "launch" / "train_node.sh"
    result = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True)
    assert result.returncode != 0
    assert f"{missing}: set it to the" in result.stderr
