r"""Start train or cache in several processes, with the flags of accelerate launch before the command's name.

%(prog)s --num_processes 2 train --dataset_dir demo/prepared --pretrained_model_name_or_path demo/tiny-wan \
    --output_dir demo/trained
%(prog)s --config_file fsdp2 --num_processes 8 train --config run.yaml

accelerate launch --help lists these flags; --config_file also takes ddp, fsdp2 or deepspeed. Without flags, train and
cache start by themselves in the processes that accelerate config has configured, and alone where nothing is
configured. `accelerate launch -m hf_bucketing.commands.train` and torchrun start them too.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from ..command_line.config_file import ACCELERATE_CONFIGS
from ..command_line.flags import FlagParser
from ..errors import FlagError, did_you_mean
from .table import COMMANDS

_STARTED = ("RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables of which torchrun, accelerate launch and mpirun set one in each process that they start."""

LAUNCHED = [name for name, command in COMMANDS.items() if command.launched]
"""Names of the commands that run in several processes."""


class LaunchParser(FlagParser):
    """A parser that takes flags of `accelerate launch`, the name of a command, and the flags of that command."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse the command line by accelerate's own parser.

        Raises:
            FlagError: If a flag is none of `accelerate launch`, or no command follows.
        """
        words = [*(sys.argv[1:] if args is None else args)]
        place = next((place for place, word in enumerate(words) if word in LAUNCHED), len(words))
        if {*words[:place]} & {"-h", "--help"}:
            return super().parse_args(["--help"], namespace)

        from accelerate.commands.launch import launch_command_parser

        parser = launch_command_parser()
        parser.error = self.error
        known = parser._option_string_actions
        for word in words[:place]:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in known:
                self.error(f"accelerate launch has no flag {flag}{did_you_mean(flag, known)}")
        if place == len(words):
            self.error(f"name what is started, {' or '.join(LAUNCHED)}, after the flags of accelerate launch")
        return argparse.Namespace(
            launch=_with_named_configs(words[:place]), command=words[place], words=words[place + 1 :]
        )


def _with_named_configs(words: Sequence[str]) -> list[str]:
    """Return flags of `accelerate launch` with the path of a file of its settings that is named without one."""
    found = []
    for before, word in zip(("", *words), words, strict=False):
        flag, is_joined, name = word.rpartition("=")
        packaged = ACCELERATE_CONFIGS / f"{name}.yaml"
        if (flag if is_joined else before) == "--config_file" and packaged.is_file() and not os.path.exists(name):
            word = f"{flag}{is_joined}{packaged}"
        found.append(word)
    return found


def make_parser() -> FlagParser:
    return LaunchParser(__doc__)


def main(args: argparse.Namespace) -> None:
    module = COMMANDS[args.command].load()
    parser = module.make_parser()
    parser.prog = f"hf_bucketing {args.command}"
    parser.parse_args(args.words)  # a wrong flag is refused once, and not by each process
    start(args.launch, module, args.words)


def launched_as_configured(module: ModuleType, words: Sequence[str]) -> Callable[[argparse.Namespace], None]:
    """Return the main function of a command, or one that starts it in the processes that accelerate is configured for.

    Args:
        module (module): Module of the command.
        words (sequence of `str`): Its flags.
    """

    def run(args: argparse.Namespace) -> None:
        if not any(name in os.environ for name in _STARTED):
            from accelerate.commands.config.config_args import default_config_file

            if os.path.isfile(default_config_file):
                start([], module, words)
        module.main(args)

    return run


def start(launch: Sequence[str], module: ModuleType, words: Sequence[str]) -> NoReturn:
    """Start a command as `accelerate launch -m` does, wait for its processes, and end with their exit code.

    They say themselves why they fail, so that no traceback of the launcher follows; Ctrl-C reaches them as it does
    this process, which waits until they have ended.

    Args:
        launch (sequence of `str`): Flags of `accelerate launch`.
        module (module): Module of the command.
        words (sequence of `str`): Its flags.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = launch_command_parser().parse_args([*launch, "--module", module.__name__, *words])
    signal.signal(signal.SIGINT, lambda *_: None)
    code = 0
    try:
        launch_command(arguments)
    except subprocess.CalledProcessError as error:
        code = error.returncode
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code < 0:
            print(f"Process {rank} was ended by signal {-code}.", file=sys.stderr)
    except SignalException as error:
        code = -error.sigval
    except ValueError as error:  # accelerate's, about flags that do not go together
        raise FlagError(f"accelerate launch: {error}") from error
    sys.exit(code if code >= 0 else 128 - code)
