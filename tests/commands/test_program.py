"""The program `hf_bucketing`: what it says about its commands, and what it imports for each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_bucketing.commands.table import COMMANDS
from tests.conftest import ROOT, run, run_command_here, run_script_here
from tests.test_import import SLOW_TO_IMPORT


def test_the_help_fits_a_screen_and_lists_the_commands_in_the_order_of_the_work() -> None:
    said = run_command_here("--help")
    lines = said.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) < 80
    order = [name for line in lines for name in COMMANDS if line.startswith(f"  {name}  ")]
    assert order == [*COMMANDS]
    work = ["prepare", "report buckets", "cache", "train", "report run", "sample", "merge"]
    assert [name for name in order if name in work] == work


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_by_its_own_name(name: str) -> None:
    said = run_command_here(*name.split(), "--help").stdout
    assert said.startswith(f"usage: hf_bucketing {name} ")
    assert "%(prog)s" not in said
    assert f"\nhf_bucketing {name}" in said, "an example of its use"


def test_a_script_explains_itself_by_its_file() -> None:
    said = run_script_here("prepare_dataset.py", "--help").stdout
    started = f"python {ROOT}/scripts/prepare_dataset.py"
    assert said.startswith(f"usage: {started}")
    assert f"\n{started} --dataset" in said
    refused = run_script_here("prepare_dataset.py", "--datset", "x", check=False)
    assert f"did you mean --dataset? ({started} --help all lists all flags)" in refused.stderr


def test_a_group_lists_its_commands() -> None:
    said = run_command_here("report", "--help")
    names = [line.split("  ")[1] for line in said.stdout.splitlines() if line.startswith("  ")]
    assert names == [name for name in COMMANDS if name.startswith("report ")]
    assert run_command_here("report", check=False).returncode == 2
    assert run_command_here(check=False).returncode == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prepar"], "hf_bucketing has no command prepar; did you mean prepare? (hf_bucketing --help lists all)"),
        (["xyz"], "hf_bucketing has no command xyz. (hf_bucketing --help lists all)"),
        (["report", "bucket"], "hf_bucketing report has no command bucket; did you mean buckets?"),
        (["report", "train"], "hf_bucketing report has no command train"),
        (["train", "--dataset_dri", "x"], "no flag --dataset_dri; did you mean --dataset_dir? (hf_bucketing train"),
        (["demo", "data", "--num_sample", "9"], "no flag --num_sample; did you mean --num_samples?"),
    ],
)
def test_a_misspelt_command_or_flag_names_the_nearest(words: list[str], said: str) -> None:
    refused = run_command_here(*words, check=False)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("FlagError: ")
    assert said in line


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_imports_no_slow_library_and_no_other_command(
    name: str, in_fresh_interpreter: Callable[[str], str]
) -> None:
    code = f"""import sys
sys.argv = ["hf_bucketing", *{name.split()!r}, "--help"]
from hf_bucketing.__main__ import main
try:
    main()
except SystemExit as end:
    print(end.code, *sys.modules)"""
    *_, last = in_fresh_interpreter(code).splitlines()
    code, *loaded = last.split()
    assert code == "0"
    assert not {module.partition(".")[0] for module in loaded} & SLOW_TO_IMPORT
    others = {command.module for other, command in COMMANDS.items() if other != name} - {"launch"}
    assert not {f"hf_bucketing.commands.{other}" for other in others} & {*loaded}


def test_python_runs_it_as_a_module(pipeline_dir: Path) -> None:
    said = run([sys.executable, "-m", "hf_bucketing", "plan", pipeline_dir, "--gpu_memor", 24], check=False)
    assert said.returncode == 2
    assert "did you mean --gpu_memory? (hf_bucketing plan --help all" in said.stderr
