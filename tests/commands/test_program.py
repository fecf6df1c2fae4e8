"""The program `hf_bucketing`: what it says about its commands, and what it imports for each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_bucketing.commands.table import COMMANDS
from tests.conftest import ROOT, as_flags, run, run_command_here, run_script_here
from tests.test_import import SLOW_TO_IMPORT

MEDIA = {"av", "PIL", "fsspec"}
DRAWS = {"report data", "demo data", "compare"}
"""Commands whose modules draw pictures, or read rows that hold some."""

NOT_IMPORTED = {
    "prepare": {"diffusers", "transformers", "peft", "bitsandbytes", "torch._dynamo", "matplotlib", "jinja2"},
    "report buckets": {"diffusers", "transformers", "accelerate", "peft", "torch._dynamo", "matplotlib", "jinja2"},
    "compare": {"torch", "diffusers", "transformers", "accelerate", "peft", "matplotlib", "jinja2"},
    "report ladders": {"torch", "datasets", *MEDIA, "matplotlib", "jinja2"},
    "demo data": {"torch", "datasets", "diffusers", "matplotlib", "jinja2"},
}
"""Libraries that a command does not import, whatever it does."""


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
    slow = SLOW_TO_IMPORT | (set() if name in DRAWS else MEDIA)
    assert not {module.partition(".")[0] for module in loaded} & slow
    others = {command.module for other, command in COMMANDS.items() if other != name} - {"launch"}
    assert not {f"hf_bucketing.commands.{other}" for other in others} & {*loaded}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_IMPORTED)
def test_a_command_imports_what_it_needs_and_not_more(
    name: str, pipeline_dir: Path, media_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    words = {
        "prepare": as_flags(
            dataset=media_dir,
            pretrained_model_name_or_path=pipeline_dir,
            bucket_tokens="60,110",
            bucket_frames="1,9",
            output_dir=tmp_path / "out",
        ),
        "report buckets": [prepared_dir, "--batch_size", 1, "--num_processes", 1],
        "compare": [prepared_dir, prepared_dir],
        "report ladders": as_flags(bucket_tokens="60", bucket_frames="1", bucket_sizes="none", samples=100),
        "demo data": as_flags(num_samples=1, output_dir=tmp_path / "out"),
    }[name]
    code = f"""import sys
sys.argv = ["hf_bucketing", *{name.split()!r}, *{[*map(str, words)]!r}]
from hf_bucketing.__main__ import main
main()
print()
print(*sys.modules)"""
    loaded = run([sys.executable, "-c", code]).stdout.splitlines()[-1].split()
    assert "hf_bucketing.commands.table" in loaded
    assert not {*loaded} & NOT_IMPORTED[name]


def test_python_runs_it_as_a_module(pipeline_dir: Path) -> None:
    said = run([sys.executable, "-m", "hf_bucketing", "plan", pipeline_dir, "--gpu_memor", 24], check=False)
    assert said.returncode == 2
    assert "did you mean --gpu_memory? (hf_bucketing plan --help all" in said.stderr
