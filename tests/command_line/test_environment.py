"""What a report of a bug needs is printed, and the last error of a script is kept for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hf_bucketing import BucketingError
from hf_bucketing.__main__ import main
from hf_bucketing.command_line.environment import describe_environment, last_error_file
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("error", [BucketingError("the clip is broken"), KeyError("the clip is broken")])
def test_the_last_error_of_a_script_is_kept_without_secrets(error: Exception, home: Path, monkeypatch) -> None:
    assert describe_environment().endswith("Last error of a script:\n- none")
    parser = FlagParser("A script.")
    parser.add_argument("--hub_token")
    parser.add_argument("--api_key")

    def script(_args: object) -> None:
        raise error

    for flag in ("--bucket_tokens", "--max_tokens", "--token_drop"):
        parser.add_argument(flag)
    numbers = ["--bucket_tokens", "60,110", "--max_tokens", "640", "--token_drop=0.5"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub_token", "hf_abc", "--api_key=xyz", *numbers])
    with pytest.raises((SystemExit, KeyError)):
        run_script(script, lambda: parser)
    assert last_error_file().is_relative_to(home)
    described = describe_environment()
    assert f"train.py --hub_token HIDDEN --api_key=HIDDEN {' '.join(numbers)}" in described
    assert "hf_abc" not in described
    assert "xyz" not in described
    assert type(error).__name__ in described
    assert "the clip is broken" in described.splitlines()[-1]


def test_an_error_that_cannot_be_kept_is_still_that_of_the_script(home: Path, monkeypatch, capsys) -> None:
    home.write_text("a file, where a folder is needed")
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def script(_args: object) -> None:
        raise BucketingError("the clip is broken")

    with pytest.raises(SystemExit) as ended:
        run_script(script, lambda: FlagParser("A script."))
    assert ended.value.code == 1
    assert "the clip is broken" in capsys.readouterr().err


def test_the_command_prints_versions_variables_and_accelerates_own_lines(home: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setattr(sys, "argv", ["hf_bucketing", "env"])
    main()
    said = capsys.readouterr().out
    assert "`Accelerate` version" in said
    assert "- ACCELERATE_MIXED_PRECISION=bf16" in said
    assert "- HF_TOKEN=HIDDEN" in said
    assert "hf_abc" not in said
    for package in ("hf_bucketing", "torch", "diffusers", "datasets"):
        assert f"\n- {package} " in said
