"""Two nodes train from an object store, which holds clips and cache; one dies, and the other one resumes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hf_bucketing.training.review import losses_of
from tests.conftest import TRAINING_SCRIPT, as_flags, launch_training, run_script_here
from tests.object_store import BUCKET, object_store
from tests.processes import dump_stacks_and_end

STEPS = 16
SECONDS = 120.0


def start_node(rank: int, *, port: int, flags: list[object]) -> subprocess.Popen[bytes]:
    """Start torchrun as on one of two nodes, with one process."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1]
    launcher += ["--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port, TRAINING_SCRIPT]
    return subprocess.Popen(list(map(str, [*launcher, *flags])), env={**os.environ, "ACCELERATE_USE_CPU": "true"})


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


@pytest.mark.slow
def test_two_nodes_train_from_a_bucket_and_one_resumes_after_the_other_died(
    media_dir: Path, pipeline_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"pretrained_model_name_or_path": pipeline_dir}
    with object_store() as store:
        store.put(str(media_dir), f"{BUCKET}/clips", recursive=True)
        prepared = {"dataset": f"{BUCKET}/clips/metadata.jsonl", "output_dir": "prepared", "target_fps": 8}
        run_script_here(
            "prepare_dataset.py", **model, **prepared, bucket_tokens="60,110,150", bucket_frames="1,9,17,25"
        )
        cached = {"dataset_dir": "prepared", "cache_dir": f"{BUCKET}/cache", "output_dir": "cached"}
        encoded = run_script_here("cache_latents.py", **model, **cached)
        found = run_script_here("cache_latents.py", **model, **cached)
        assert "20 rows encoded" in encoded.stdout
        assert "20 rows found" in found.stdout
        flags = as_flags(**model, dataset_dir="cached", output_dir="trained", lora_rank=2, max_train_steps=STEPS)
        flags += as_flags(train_batch_size=2, checkpointing_steps=2, dataloader_num_workers=1, report_to="none")
        train_on_two_nodes_until(lambda: any(Path("trained").glob("checkpoint-*")), flags)
        resumed = launch_training(*flags, "--resume_from_checkpoint", "latest", num_processes=1)
        assert "Resumed after optimizer step" in resumed.stderr
        assert len(losses_of(Path("trained"))) == STEPS
        assert not Path("cache").exists()
        run_script_here("report_training.py", "trained", min_fall=-9)
