"""Write a small data set of generated videos and images, with captions.

%(prog)s --output_dir demo/media
"""

from __future__ import annotations

import argparse

from ..command_line.flags import FlagParser
from ..synthetic.media import make_media_dataset


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--output_dir", required=True, help="Folder to write; a demo data set there is replaced.")
    parser.add_argument("--num_samples", type=int, default=90, help="Number of videos and images together.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the contents.")
    return parser


def main(args: argparse.Namespace) -> None:
    make_media_dataset(args.output_dir, num_samples=args.num_samples, seed=args.seed)
    print(f"Wrote {args.num_samples} samples to {args.output_dir}")
