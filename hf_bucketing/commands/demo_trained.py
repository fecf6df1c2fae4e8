"""Save the small pipeline of Wan's classes that the demo fine-tunes; its weights come with the package.

%(prog)s --output_dir demo/tiny-wan
"""

from __future__ import annotations

import argparse

from ..command_line.flags import FlagParser


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--output_dir", required=True, help="Folder to write; a pipeline there is replaced.")
    return parser


def main(args: argparse.Namespace) -> None:
    from ..synthetic.demo import make_demo_pipeline

    make_demo_pipeline(args.output_dir)
    print(f"Saved the demo's pipeline to {args.output_dir}")
