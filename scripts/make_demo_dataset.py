"""Write a small data set of generated videos and images, with captions.

python scripts/make_demo_dataset.py --output_dir demo/media
"""

import argparse

from hf_bucketing.errors import exit_with_message
from hf_bucketing.testing import make_media_dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True, help="Folder to write; an earlier data set there is replaced.")
    parser.add_argument("--num_samples", type=int, default=90, help="Videos and images together (default: 90).")
    parser.add_argument("--seed", type=int, default=0, help="Decides what is shown (default: 0).")
    args = parser.parse_args()
    make_media_dataset(args.output_dir, num_samples=args.num_samples, seed=args.seed)
    print(f"Wrote {args.num_samples} samples to {args.output_dir}")


if __name__ == "__main__":
    exit_with_message(main)
