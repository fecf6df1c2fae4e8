"""What `--help` prints: the flags that most people need, and with `all` every flag."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass

import pytest

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.help import MOST_FLAGS
from hf_bucketing.commands.table import COMMANDS
from hf_bucketing.settings import setting


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that a script has.

    Args:
        path (`str`): File to read.
        speed (`int`): Steps per second.
        colour (`str`): Colour of the bar.
    """

    path: str
    speed: int = setting(3, common=True)
    colour: str = "red"


def printed(parser: FlagParser, words: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_begins_with_common_flags_and_all_prints_every_flag(capsys) -> None:
    names = [f"rare_{number}" for number in range(MOST_FLAGS)]
    rare = make_dataclass("Rare", [(name, int, field(default=0)) for name in names], frozen=True, kw_only=True)
    parser = FlagParser("Do it.", Settings, rare)
    parser.add_argument("--plain", common=True, help="Neither.")
    short, long = (printed(parser, words, capsys) for words in (["--help"], ["--help", "all"]))
    for text in ("Do it.", "File to read.", "Steps per second. (default: 3)", "Neither. (default: none)"):
        assert text in short
        assert text in long
    assert f"--help all prints all {MOST_FLAGS + 4} settings in groups." in short
    for text in ("--colour", "--rare_0", "--help"):
        assert (text in short.replace("--help all prints", ""), text in long) == (False, True)
    assert short == printed(parser, ["-h"], capsys)


def test_help_of_few_flags_prints_them_all(capsys) -> None:
    assert "Colour of the bar. (default: red)" in printed(FlagParser("Do it.", Settings), ["--help"], capsys)


@pytest.mark.parametrize("command", ["train", "prepare", "plan", "sample"])
def test_commands_of_many_flags_say_which_most_people_need(command: str) -> None:
    parser = COMMANDS[command].load().make_parser()
    assert len(parser.flags) > MOST_FLAGS
    assert 8 <= len(parser.common) <= 15
    assert {action.dest for action in parser._actions if action.required} <= {action.dest for action in parser.common}
