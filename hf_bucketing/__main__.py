"""`hf_bucketing env` prints what a report of a bug needs; the scripts do all else."""

import argparse

from .command_line.environment import print_environment


def _print_environment() -> None:
    from .packing.attention.kernels import describe_kernels

    print_environment({"Kernels of variable lengths, for attention in packs": describe_kernels()})


def main() -> None:
    """Run a command of the package."""
    parser = argparse.ArgumentParser("hf_bucketing", description="Training, reports and caches are in scripts/.")
    commands = parser.add_subparsers(required=True, metavar="command")
    env = commands.add_parser("env", help="Print versions, devices, variables and the last error, for bug reports.")
    env.set_defaults(run=_print_environment)
    parser.parse_args().run()


if __name__ == "__main__":
    main()
