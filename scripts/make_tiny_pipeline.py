"""Save a pipeline with small random weights, to try the training script without a hub.

python scripts/make_tiny_pipeline.py --output_dir demo/tiny-wan
"""

import argparse

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--output_dir", required=True, help="Folder to write; a tiny pipeline there is replaced.")
    parser.add_argument("--family", default="wan", help="Name of the pipeline, such as wan, ltx or latte.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the weights.")
    return parser


def main(args: argparse.Namespace) -> None:
    from synthetic.pipelines import make_tiny_pipeline

    make_tiny_pipeline(args.output_dir, family=args.family, seed=args.seed)
    print(f"Saved a tiny {args.family} pipeline to {args.output_dir}")


if __name__ == "__main__":
    run_script(main, make_parser)
