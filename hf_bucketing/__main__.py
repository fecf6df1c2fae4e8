"""The program `hf_bucketing`: it imports the module of the command that it is asked for, and of no other."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from .commands.table import COMMANDS, Command
from .errors import did_you_mean

_PROGRAM = "hf_bucketing"
_HELP = ("-h", "--help")


def main() -> None:
    """Run a command of the package."""
    words = sys.argv[1:]
    name = next((name for name in (" ".join(words[:2]), *words[:1]) if name in COMMANDS), None)
    if name is not None:
        run(name, words[len(name.split()) :])
        return
    group = {name: command for name, command in COMMANDS.items() if name.split()[0] in words[:1]}
    asked = [word for word in words[bool(group) : bool(group) + 1] if word not in _HELP]
    if asked:
        known = [name.removeprefix(f"{words[0]} ") for name in group] or [*_first_words(COMMANDS)]
        what = " ".join([_PROGRAM, *words[: bool(group)]])
        sys.exit(_refuse(f"{what} has no command {asked[0]}{did_you_mean(asked[0], known)} ({what} --help lists all)"))
    print(describe_commands(group or COMMANDS), end="")
    sys.exit(0 if words[-1:] and words[-1] in _HELP else 2)


def run(name: str, words: Sequence[str]) -> None:
    """Run a command with its flags, in the processes that a launcher is configured to start."""
    from .command_line.script import NOTHING_LEFT, run_script

    command = COMMANDS[name]
    module = command.load()
    run_command = module.main
    if command.launched:
        from .commands.launch import launched_as_configured

        run_command = launched_as_configured(module, words)
    run_script(
        run_command,
        module.make_parser,
        words=words,
        program=f"{_PROGRAM} {name}",
        interrupted=getattr(module, "INTERRUPTED", NOTHING_LEFT),
    )


def describe_commands(commands: Mapping[str, Command]) -> str:
    """Return what each of some commands is for, as `--help` prints it."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{command.does}" for name, command in commands.items()]
    head = f"usage: {_PROGRAM} COMMAND [flags]\n\nIn the order of the work; {_PROGRAM} COMMAND --help says more:\n\n"
    return head + "\n".join(lines) + "\n"


def _first_words(names: Mapping[str, object]) -> dict[str, None]:
    return dict.fromkeys(name.split()[0] for name in names)


def _refuse(message: str) -> int:
    print(f"FlagError: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
