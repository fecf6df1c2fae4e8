"""Save the small pipeline of Wan's classes that the demo fine-tunes; its weights come with the package.

python scripts/make_demo_pipeline.py --output_dir demo/tiny-wan
"""

import argparse

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--output_dir", required=True, help="Folder to write; a pipeline there is replaced.")
    return parser


def main(args: argparse.Namespace) -> None:
    from synthetic.demo import make_demo_pipeline

    make_demo_pipeline(args.output_dir)
    print(f"Saved the demo's pipeline to {args.output_dir}")


if __name__ == "__main__":
    run_script(main, make_parser)
