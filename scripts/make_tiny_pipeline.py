"""Save a text-to-video pipeline with small random weights, to try the training script without a hub.

python scripts/make_tiny_pipeline.py --output_dir demo/tiny-wan
"""

import argparse

from hf_bucketing.errors import exit_with_message
from hf_bucketing.testing import make_tiny_pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True, help="Folder to write; an earlier pipeline there is replaced.")
    parser.add_argument("--family", default="wan", choices=["wan", "ltx", "latte"], help="Whose parts (default: wan).")
    parser.add_argument("--seed", type=int, default=0, help="Of the weights (default: 0).")
    args = parser.parse_args()
    make_tiny_pipeline(args.output_dir, family=args.family, seed=args.seed)
    print(f"Saved a tiny {args.family} pipeline to {args.output_dir}")


if __name__ == "__main__":
    exit_with_message(main)
