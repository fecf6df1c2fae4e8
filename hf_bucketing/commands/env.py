"""Print versions, devices, variables and the last error of a command, for reports of bugs.

%(prog)s
"""

from __future__ import annotations

import argparse

from ..command_line.environment import print_environment
from ..command_line.flags import FlagParser


def make_parser() -> FlagParser:
    return FlagParser(__doc__)


def main(args: argparse.Namespace) -> None:
    from ..packing.attention.kernels import describe_kernels

    print_environment({"Kernels of variable lengths, for attention in packs": describe_kernels()})
