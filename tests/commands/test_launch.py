"""The commands train and cache start in the processes that a launcher is configured to start."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from accelerate.commands.config import config_args

from hf_bucketing.command_line.config_file import ACCELERATE_CONFIGS
from hf_bucketing.commands import launch, train
from hf_bucketing.errors import FlagError
from hf_bucketing.runs.logs import Logs
from tests.command_line.test_interrupts import interrupt
from tests.conftest import as_flags, launch_flags, run, run_command_here

CONFIGURED = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_processes: 2
num_machines: 1
mixed_precision: 'no'
main_process_port: 0
"""
STARTED = ("RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is started by a launcher, and what runs in this process, in place of both."""
    seen: list[Any] = []
    for name in STARTED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "start", lambda flags, module, words: seen.append((flags, module.__name__, words)))
    return seen


def module_of(seen: list[Any]) -> ModuleType:
    module = ModuleType("hf_bucketing.commands.pretended")
    module.main = lambda args: seen.append("here")  # type: ignore[attr-defined]
    return module


def test_settings_of_accelerate_that_come_with_the_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flags(*words: str) -> list[str]:
        return launch.make_parser().parse_args([*words, "train", "--seed", "1"]).launch

    monkeypatch.chdir(tmp_path)
    (tmp_path / "ddp").write_text("num_processes: 2")
    folder = ACCELERATE_CONFIGS
    fsdp2 = str(folder / "fsdp2.yaml")
    assert flags("--config_file", "fsdp2", "--num_processes", "8") == ["--config_file", fsdp2, "--num_processes", "8"]
    assert flags("--config_file=deepspeed") == [f"--config_file={folder / 'deepspeed.yaml'}"]
    for words in (["--config_file", "ddp"], ["--config_file", "other.yaml"], ["--main_process_ip", "fsdp2"]):
        assert flags(*words) == words
    assert {path.stem for path in folder.iterdir()} == {"ddp", "fsdp2", "deepspeed"}


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("variable", [None, *STARTED])
def test_a_command_is_launched_where_accelerate_is_configured_and_no_launcher_has_started_it(
    configured: bool, variable: str | None, started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "default_config.yaml"
    monkeypatch.setattr(config_args, "default_config_file", str(file))
    if configured:
        file.write_text(CONFIGURED)
    if variable is not None:
        monkeypatch.setenv(variable, "0")
    launch.launched_as_configured(module_of(started), ["--seed", "3"])(argparse.Namespace())
    first = ([], "hf_bucketing.commands.pretended", ["--seed", "3"])
    assert started[0] == (first if configured and variable is None else "here")


def test_flags_before_the_command_are_those_of_the_launcher(started: list[Any]) -> None:
    flags = ["--dataset_dir", "d", "--pretrained_model_name_or_path", "m", "--output_dir", "o"]
    words = ["--num_processes", "2", "--mixed_precision=bf16", "train", *flags]
    launch.main(launch.make_parser().parse_args(words))
    assert started == [(words[:3], train.__name__, flags)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num_proceses 2 train", "accelerate launch has no flag --num_proceses; did you mean --num_processes?"),
        ("--num_processes 2", "name what is started, cache or train, after the flags of accelerate launch"),
        ("--num_processes 2 sample p", "name what is started, cache or train"),
        ("", "name what is started, cache or train"),
    ],
)
def test_what_cannot_be_launched_is_refused(words: str, said: str) -> None:
    with pytest.raises(FlagError, match=said):
        launch.make_parser().parse_args(words.split())


def test_a_wrong_flag_of_the_command_is_refused_before_anything_is_started() -> None:
    refused = run_command_here("launch", "--num_processes", 2, "train", "--datset_dir", "d", check=False)
    assert refused.returncode == 2
    assert "no flag --datset_dir; did you mean --dataset_dir? (hf_bucketing train --help" in refused.stderr


def training(pipeline: Path, prepared: Path, output: Path) -> list[object]:
    return as_flags(
        pretrained_model_name_or_path=pipeline,
        dataset_dir=prepared,
        output_dir=output,
        max_train_steps=1,
        max_sequence_length=32,
        report_to="none",
    )


@pytest.mark.slow
def test_two_processes_are_started_by_the_default_file_and_by_flags(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    (home / "accelerate").mkdir(parents=True)
    (home / "accelerate" / "default_config.yaml").write_text(CONFIGURED)
    program, cpu = [sys.executable, "-m", "hf_bucketing"], {"ACCELERATE_USE_CPU": "true"}
    run([*program, "train", *training(pipeline_dir, prepared_dir, tmp_path / "a")], env={**cpu, "HF_HOME": str(home)})
    flags = ["--main_process_port", 0, *launch_flags(2)]
    run([*program, "launch", *flags, "train", *training(pipeline_dir, prepared_dir, tmp_path / "b")], env=cpu)
    assert [Logs(tmp_path / name).first_plans[0]["num_processes"] for name in "ab"] == [2, 2]


@pytest.mark.every
@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.every), 2])
def test_what_fails_is_said_once_and_ends_the_launcher_with_its_code(
    num_processes: int, pipeline_dir: Path, tmp_path: Path
) -> None:
    flags = ["--main_process_port", 0, *launch_flags(num_processes)]
    command = [sys.executable, "-m", "hf_bucketing", "launch", *flags, "train"]
    failed = run(
        [*command, *training(pipeline_dir, tmp_path / "nowhere", tmp_path / "out")],
        env={"ACCELERATE_USE_CPU": "true"},
        check=False,
    )
    assert failed.returncode == 1
    assert failed.stderr.count("holds no bucketing.json; make it with hf_bucketing prepare.") == 1, failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_ctrl_c_reaches_the_processes_and_is_answered_once(
    num_processes: int, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log.txt"
    flags = ["--main_process_port", 0, *launch_flags(num_processes)]
    forever = [*training(pipeline_dir, prepared_dir, out), "--max_train_steps", 10**6, "--checkpointing_steps", 2]
    command = [sys.executable, "-m", "hf_bucketing", "launch", *flags, "train", *forever]
    code = interrupt(command, log, lambda text: (out / "checkpoint-2").exists())
    text = log.read_text()
    assert code == 130, text
    assert text.count("Interrupted. ") == 1
    assert "Traceback" not in text
