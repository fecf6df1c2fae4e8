"""Every command, flag and config file that README.md and docs/ show is understood by the scripts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_bucketing.columns.settings import SourceConfig
from hf_bucketing.columns.source_lists import sources_from
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.commands.script_settings import settings_of_scripts
from hf_bucketing.commands.table import COMMANDS
from tests.docs.pages import PAGES, call_of, run_call

OTHER_FLAGS = {
    # accelerate launch
    "--cpu",
    "--multi_gpu",
    "--num_processes",
    "--config_file",
    "--num_machines",
    "--machine_rank",
    # mistyped, to show the message
    "--lora_rnk",
}

OTHER_SPANS = [["launch"], ["NAME"], ["--help"]]
"""What the text says of the program itself."""

CACHED = "cache_dir: cache\ncached_dir: cached\n"
"""Settings that a suggested run has beside those of the pages' file."""


class ParsedError(Exception):
    """A script's parser has taken its arguments."""


def parse(script: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Parse arguments by a script's own parser, and return it; the script goes no further."""
    original = argparse.ArgumentParser.parse_known_args

    def parse_only(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = original(self, args, namespace)
        if not isinstance(self, FlagParser):  # the one that looks for --config
            return found, unknown
        assert not unknown, f"{script} does not know {unknown}"
        raise ParsedError(self)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_only)
        with pytest.raises(ParsedError) as parsed:
            run_call(script, *arguments)
    return parsed.value.args[0]


@pytest.fixture
def files_of_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The named YAML files that the pages show, in the working directory."""
    monkeypatch.chdir(tmp_path)
    files = {}
    for page in PAGES.values():
        for block in page.blocks("yaml"):
            name = re.match(r"# (\S+\.yaml)\n", block)
            if name:
                files[name[1]] = tmp_path / name[1]
                files[name[1]].write_text(block)
    for folder in ("trained", "suggested/1"):  # as a run and a suggestion leave it
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.yaml").write_text(files["run.yaml"].read_text() + CACHED)
    return files


def test_no_command_is_cut_at_the_width_of_the_site() -> None:
    lines = [line for page in PAGES.values() for block in page.blocks("bash") for line in block.splitlines()]
    assert not [line for line in lines if len(line) > 88 and not re.match(r" +--\w+ \S+( \\)?$", line)]


def test_every_block_of_settings_is_yaml() -> None:
    for page in PAGES.values():
        for block in page.blocks("yaml"):
            assert isinstance(yaml.safe_load(block), dict), f"{page.name}:\n{block}"


def test_the_file_of_settings_lists_sources(files_of_settings: dict[str, Path]) -> None:
    parser = FlagParser(None)
    parser.add_settings(SourceConfig, several=["dataset"])
    parser.add_config("prepare_dataset", others=settings_of_scripts)
    args = parser.parse_args(["--config", str(files_of_settings["run.yaml"])])
    first, second = sources_from(vars(args), args.config)
    assert (first.dataset, first.target_fps, first.repeats) == ("clips", 16.0, 1.0)
    assert (second.dataset, second.target_fps, second.repeats) == ("faces.parquet", 8.0, 2.0)
    assert first.table.bucket_tokens == second.table.bucket_tokens == [8190, 18480]


@pytest.mark.usefixtures("files_of_settings")
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if page.calls()])
def test_every_call_of_a_command_is_understood_by_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for script, arguments in PAGES[name].calls():
        parse(script, arguments, monkeypatch)


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if "`hf_bucketing " in page.text])
def test_every_command_that_the_text_names_has_the_flags_beside_it(name: str) -> None:
    for span in PAGES[name].spans:
        words = span.replace("…", "").split()
        if words[1:] and words[1:] not in OTHER_SPANS and (call := call_of(words)) is not None and call[0] in COMMANDS:
            known = COMMANDS[call[0]].load().make_parser()._option_string_actions
            flags = [word.partition("=")[0] for word in call[1] if word.startswith("--")]
            assert not [flag for flag in flags if flag not in known], span


@pytest.mark.usefixtures("files_of_settings")
def test_every_flag_that_the_text_names_is_one_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [call for page in PAGES.values() for call in page.calls()]
    assert {script for script, _ in calls} >= {
        "prepare",
        "train",
        "sample",
        "cache",
        "report buckets",
        "report run",
    }
    parsers = [parse(script, arguments, monkeypatch) for script, arguments in dict(calls).items()]
    known = {option for parser in parsers for option in parser._option_string_actions} | OTHER_FLAGS
    for page in PAGES.values():
        named = [flag for span in page.spans for flag in re.findall(r"(?<!\S)--\w+", span)]
        assert not [flag for flag in named if flag not in known], page.name
