"""Save a pipeline with small random weights, to try the training script without a hub.

%(prog)s --output_dir demo/tiny-wan
"""

from __future__ import annotations

import argparse

from ..command_line.flags import FlagParser


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--output_dir", required=True, help="Folder to write; a tiny pipeline there is replaced.")
    parser.add_argument("--family", default="wan", help="Name of the pipeline, such as wan, ltx or latte.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the weights.")
    return parser


def main(args: argparse.Namespace) -> None:
    from ..synthetic.pipelines import make_tiny_pipeline

    make_tiny_pipeline(args.output_dir, family=args.family, seed=args.seed)
    print(f"Saved a tiny {args.family} pipeline to {args.output_dir}")
