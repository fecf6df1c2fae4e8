"""Scripts that are interrupted, or fail in one or all of their processes: one message, an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hf_bucketing.runs.run_log import read_status
from tests.conftest import ROOT, as_flags, launch
from tests.training.training_cases import BATCHING, train

TRAIN = ROOT / "scripts" / "train_text_to_video.py"
LAUNCH = ("-m", "accelerate.commands.launch", "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no",
          "--main_process_port", 0)  # fmt: skip

FAILING = """
import argparse, os, time
from hf_bucketing import BucketingError
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script

def make_parser():
    parser = FlagParser("Fails.")
    parser.add_argument("--ranks", type=int, nargs="+")
    return parser

def main(args):
    if int(os.environ["RANK"]) in args.ranks:
        raise BucketingError("The message to read.")
    time.sleep(120)

if __name__ == "__main__":
    run_script(main, make_parser)
"""


@pytest.mark.cases(slow=("all",))
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "only the second"])
def test_an_error_of_several_processes_is_said_once_and_of_one_by_that_one(ranks, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    result = launch(tmp_path / "failing.py", "--ranks", *ranks, num_processes=2, check=False)
    assert result.returncode == 1
    assert result.stderr.count("The message to read.") == 1
    assert ("Process 1 of 2: " in result.stderr) == (ranks == (1,))
    assert "enable traceback" not in result.stderr


def interrupt(
    command: list[object],
    output: Path,
    ready: Callable[[str], bool],
    *,
    group: bool = True,
    number: signal.Signals = signal.SIGINT,
) -> int:
    """Run a command until its output is such, send what Ctrl-C sends, and return the exit code once all has ended."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    with output.open("w") as file:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=file, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        started: list[psutil.Process] = []
        try:
            deadline = time.monotonic() + 240
            while not ready(output.read_text()):
                assert process.poll() is None, output.read_text()
                assert time.monotonic() < deadline, "the script never came as far"
                time.sleep(0.1)
            started = psutil.Process(process.pid).children(recursive=True)
            (os.killpg if group else os.kill)(process.pid, number)
            process.wait(timeout=120)
            _, left = psutil.wait_procs(started, timeout=60)
            assert not left
        finally:
            for child in started:
                if child.is_running():
                    child.kill()
            process.kill()
            process.wait()
    return process.returncode


@pytest.mark.cases(slow=("terminal",))
@pytest.mark.parametrize("group", [True, False], ids=["terminal", "signal"])
def test_ctrl_c_ends_preparing_with_several_processes(group: bool, media_dir, pipeline_dir, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, time, runpy\n"
        "import hf_bucketing.columns.metadata as metadata\n"
        "read_header = metadata.read_header\n"
        "def slowly(*args, **options):\n"
        "    print('reading', flush=True)\n"
        "    time.sleep(5)\n"
        "    return read_header(*args, **options)\n"
        "metadata.read_header = slowly\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    flags = as_flags(
        dataset=media_dir,
        num_proc=2,
        pretrained_model_name_or_path=pipeline_dir,
        output_dir=tmp_path / "out",
        bucket_tokens="60",
        bucket_frames="1,9",
    )
    command = [sys.executable, slow, ROOT / "scripts" / "prepare_dataset.py", *flags]
    code = interrupt(command, tmp_path / "log.txt", lambda text: "reading" in text, group=group)
    text = (tmp_path / "log.txt").read_text()
    assert code == 130, text
    assert text.splitlines()[-1].startswith("Interrupted. "), text
    assert "Traceback" not in text
    assert not (tmp_path / "out").exists()


def training(pipeline: Path, prepared: Path, output: Path) -> list[object]:
    flags = as_flags(
        pretrained_model_name_or_path=pipeline,
        dataset_dir=prepared,
        output_dir=output,
        max_sequence_length=32,
        dataloader_num_workers=1,
        report_to="none",
        checkpointing_steps=2,
        num_train_epochs=1000,
    )
    return [TRAIN, *flags, *BATCHING["bucket"]]


@pytest.mark.every
def test_the_signal_of_schedulers_saves_the_step_and_says_how_to_go_on(
    pipeline_dir, prepared_dir, tmp_path: Path
) -> None:
    number = signal.SIGTERM
    out = tmp_path / "out"
    command = [sys.executable, *training(pipeline_dir, prepared_dir, out)]
    code = interrupt(command, tmp_path / "log.txt", lambda text: (out / "checkpoint-2").exists(), number=number)
    text = (tmp_path / "log.txt").read_text()
    assert code == 128 + number, text
    assert "Traceback" not in text
    last = text.splitlines()[-1]
    step = last.removeprefix("Interrupted. Training was at optimizer step ").split()[0]
    assert f"checkpoint-{step} is saved" in last, text
    assert (out / f"checkpoint-{step}" / "progress.json").is_file()
    assert "--resume_from_checkpoint latest" in last


@pytest.mark.slow
def test_ctrl_c_under_accelerate_launch_is_said_once(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, *LAUNCH, "--multi_gpu", "--num_processes", 2]
    command += training(pipeline_dir, prepared_dir, out)
    code = interrupt(command, tmp_path / "log.txt", lambda text: (out / "checkpoint-2").exists())
    text = (tmp_path / "log.txt").read_text()
    assert code, text
    assert text.count("Interrupted. Training was at optimizer step ") == 1, text
    saved = read_status(out)
    assert saved is not None
    assert saved["status"] == "interrupted", text
    assert (out / f"checkpoint-{saved['global_step']}" / "progress.json").is_file()
    further = saved["global_step"] + 1
    flags = (*BATCHING["bucket"], "--resume_from_checkpoint", "latest", "--max_train_steps", further)
    train(pipeline_dir, prepared_dir, out, *flags)
